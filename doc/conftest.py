"""Pages of the documentation are doctests; scripts and what Sphinx writes are not."""

collect_ignore_glob = ["conf.py", "figures/*", "auto_examples/*", "generated/*"]
