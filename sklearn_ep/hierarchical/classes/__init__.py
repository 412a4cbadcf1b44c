"""More than two classes jointly: softmax with an effect of every level for every class."""
