"""Several grouping factors, nested or crossed: EP given the scales, and messages along rows."""
