"""One set of sites over all rows, exact given the scales: all factors but the largest dense."""
