"""What an estimator does with an average over hyperparameters: predict from it, and tell of it."""

import numpy as np

from .._engine.hyper import draw_mixture, mixture_covariance
from .latents import NodesAtRows, draw_latent, label_log_prob, latent_mean

_MUCH_FORETOLD = 0.1  # share of the mass beyond the nodes that is worth a remark


def average_remarks(averages):
    """Return what `diagnose` says of the averages, one a problem."""
    several = [a for a in averages if len(a.nodes) > 1]
    if not several:
        return ()
    numbers = ", ".join(f"{len(a.nodes)} (effective {a.effective_number:.1f})" for a in several)
    remarks = [f"Hyperparameters are averaged over nodes: {numbers}."]
    foretold = max(a.foretold for a in several)
    if foretold > _MUCH_FORETOLD:
        remarks.append(
            f"The grid of nodes ends too early: a share of {foretold:.2f} of the mass is "
            "expected beyond it, and intervals are too narrow."
        )
    return tuple(remarks)


class AveragedPosterior:
    """Mixture of the posteriors of one problem at several hyperparameters, of weight (M,).

    The weight sums to one. Follows the contract of what it mixes: the items of
    `latents.SeparateLatents`, or the item of `latents.JointLatents`, with all classes.
    """

    def __init__(self, posteriors, weight):
        self.posteriors, self.weight = posteriors, weight

    @property
    def n_classes(self):
        """Number of classes of a joint posterior, 1 of a binary problem."""
        return getattr(self.posteriors[0], "n_classes", 1)

    @property
    def factor(self):
        """Factor of the labels; that of the heaviest node where they differ."""
        return self.posteriors[int(np.argmax(self.weight))].factor

    def links(self, link):
        """Return the link of each node: its own factor where `link` is that of the heaviest."""
        own = link is self.factor
        return [p.factor if own else link for p in self.posteriors]

    def moments(self, X):
        """Return means (M, n) or (M, n, K) of the nodes, and variances or covariances."""
        mean, var = zip(*(p.latent(X) for p in self.posteriors), strict=True)
        return np.array(mean), np.array(var)

    def at_nodes(self, link, X):
        """Return the `NodesAtRows`."""
        mean, var = self.moments(X)
        return NodesAtRows(self.weight, mean, var, self.links(link))

    def latent(self, X):
        """Return means and variances, or covariances of classes, by the law of total variance."""
        return self.at_nodes(self.factor, X).moments()

    def latent_mean(self, X):
        """Return means (n,) or (n, K), at the cost of those of the nodes."""
        return np.tensordot(self.weight, [latent_mean(p, X) for p in self.posteriors], 1)

    def covariance(self, X1, X2):
        """Return the covariance (n1, n2) by the law of the total."""
        each = [p.covariance(X1, X2) for p in self.posteriors]
        return mixture_covariance(self.weight, each, *map(self._means, (X1, X2)))

    def covariances_with(self, X2, pairs):
        """Return the map from rows X1 to covariances (P, n1, n2) of pairs of classes with X2."""
        each = [p.covariances_with(X2, pairs) for p in self.posteriors]
        first, second = np.transpose(pairs)
        right = self._means(X2)[:, second]

        def of_rows(X1):
            left = self._means(X1)[:, first]
            return mixture_covariance(self.weight, (own(X1) for own in each), left, right)

        return of_rows

    def _means(self, X):
        """Return the means (M, n) or (M, K, n) of the nodes."""
        return np.array([latent_mean(p, X).T for p in self.posteriors])

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n) or (n_samples, n, K), each from one node."""
        return draw_mixture(
            self.weight, lambda m, n: draw_latent(self.posteriors[m], X, n, rng), n_samples, rng
        )

    def draw_log_prob(self, link, X, n_samples, rng):
        """Return label log probabilities (n_samples, n, 2) of draws of a binary problem."""
        links = self.links(link)

        def of_node(m, n):
            return label_log_prob(links[m], draw_latent(self.posteriors[m], X, n, rng))

        return draw_mixture(self.weight, of_node, n_samples, rng)
