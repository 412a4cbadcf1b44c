"""What watches a fit with factors."""

__all__ = ["PosteriorMonitor"]


class PosteriorMonitor:
    """Monitor that tells another, of each state, what predicts as if the fit stopped there.

    `posterior` maps the payload of an iteration to that; `save`, if not None, is called with each.
    """

    def __init__(self, monitor, posterior, save=None):
        self.monitor, self.posterior, self.save = monitor, posterior, save

    def begin(self, name="iteration"):
        """Tell that an iteration starts."""
        self.monitor.begin(name)

    def end(self, record, payload):
        """Tell that an iteration ended; return whether to stop."""
        if self.save is not None:
            self.save(payload)
        return self.monitor.end(record, lambda: self.posterior(payload))

    def phase(self, name):
        """Open a phase of work that leads to the next iteration."""
        return self.monitor.phase(name)
