"""One module a paper: its tables and figures, as items that run."""
