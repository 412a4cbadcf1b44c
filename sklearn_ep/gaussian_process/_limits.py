"""The sizes at which the Gaussian processes change their method, each with what was measured."""

from dataclasses import dataclass


@dataclass
class ProcessLimits:
    """Numbers of rows, columns or entries.

    Of rows, distinct ones where they choose between full matrices and inducing points, copies where
    they choose how a fit learns, as weights are repeated rows.
    """

    # up to which "auto" keeps the full covariance matrix, and inducing points stay where they are,
    # unless the next says otherwise
    dense: int = 2000
    # up to which "auto" averages. Beyond, the default kernel of up to eight classes starts from an
    # average over some rows and goes through inducing points. Of two classes from 1000 to 1001 rows
    # the cost moves by a fifth at most, the log loss of 20 generated columns from .341 to .340,
    # image .062 to .060, waveform .221 to .223, splice .144 to .150 (the mode of one length for
    # all: .34, .10 and .28)
    averaged: int = 1000
    # through inducing points, and up to how many a point, with all that the dense average found: of
    # 22 sets with five rows a point the log loss is .010 lower than with the mode, .075 lower
    # to .014 higher, in the same time; with 20 a point .007 lower, but .11 higher on one, in 1.4
    # of the time; 680 rows of 26 sets have .015 less in 1.8 times the time. Where points are asked
    # to move it is `first_rows`: of australian (621 rows) 20 splits have a log loss lower by .001
    # than by passes that move points at the kernels of the same nodes, of breast_wisconsin (615)
    # the same, in .3 to .8 of the time
    averaged_through_points: tuple = (500, 7)
    # columns up to which each gets a length of its own: their curvature takes n^3 flops and n^2
    # numbers each. On ten sets of 130 to 300 columns the log loss is .24 in the mean, and .34 with
    # one length for all: lower on seven, by up to .39, higher by .02 on three of text and pixels
    lengths: int = 500
    # below which variance and mean length are so open that equal lengths have a lattice; from which
    # of more than two classes the modes alone count (with 149 to 299 rows of five classes the log
    # loss changes by .0001, the cost by a third)
    lattice: int = 100
    # of labels that may be wrong, to which it is whole and at which it ends, for six weighed nodes:
    # with these the log loss of fourteen sets of up to 400 rows is .002 higher, by up to .019; for
    # the less probable of the models with and without errors alone it is that of lattices for both
    # (46 fits of 150 rows: -.0005, up to .003)
    lattice_errors: tuple = (299, 600)
    # above which variance and mean length are known well enough: four nodes about the mode do, and
    # where lengths differ the modes alone count (on twelve sets of 300 to 400 rows the mean log
    # loss changes by .0003, at most by .002), found by some of the rows: a third of 205 rows moves
    # the log loss of eight sets by .004, up to .03
    several: int = 299
    # from which a search begins with a third of the rows, whose evidence costs a thirtieth, and
    # passes sites in single precision: 500 rows of diabetes are learned in .17 s for .60 s, 270 of
    # several classes in .5 s for .8 (waves) and .7 s for 1.4 (rings), 160 with labels that may be
    # wrong in .10 s for .12, 120 of these in no less; 66 fits of two classes with 160, 230 and 290
    # rows take .95, .92 and .84 of the time, at a log loss of +.0001 (-.006 to +.003). Of several
    # classes lengths by a third are rough, but on 32 tables of 160 and 240 rows those by half of
    # the rows, by all and in the mean of three thirds have a log loss of +.002, +.001 and +.001 (sd
    # .005 each), in 1.1 to 1.5 times the time
    thirds: int = 150
    # of several classes up to which a search from there steps on until the gain is small, the less
    # patiently the more rows: on six classes with 300 rows a search that ends at the first step
    # without one is twelve nats lower (log loss .685 after .637); beyond, where an evaluation takes
    # many seconds, it ends there
    patient: int = 1000
    # from which passes of learning are in single precision. Steps lead rounding on: weights and
    # repeated rows of few rows (330) end up to .03 apart, in double 2e-5; some 2260 copies of 1500
    # rows are 7e-5 apart in single. In double 33 fits to 1100 and 2001 rows take 1.1 times as long,
    # 12 to 5000 1.4 times
    single_passes: int = 2001
    # from which they begin with some of the rows; of fewer their time hardly counts
    some_passes: int = 10_000
    # entries of X that these rows have at most: they are copied to memory, an eighth of a gigabyte,
    # where X may be a memory map or in partitions
    some_entries: int = 2**24
    # rows that passes begin with at least: inducing points fit fewer too closely
    least_passes: int = 2000
    # up to which lengths of columns have a prior through inducing points: of fewer their evidence
    # overfits (at 240 rows of heart log loss .43 after .51, at 1300 of image .068 after .061)
    prior_of_lengths: int = 1000
    # distinct ones whose average passes over more than `averaged` start from: with these as dear as
    # the average of 1000. With 600, and 1000, 5000 rows of 20 columns have a log loss of .280 and
    # .279, 2400 of splice .138 and .139, in .4 and 1.4 s
    first_rows: int = 800
    # inducing points of many rows, and the most of fewer rows whose kernel some of them have found
    points: tuple = (100, 200)
    # classes times points up to which all classes have joint sites after passes of each: their
    # covariance has the square of it. With five and six classes 2001 rows have a log loss of .501
    # and .612 (one against the rest .530 and .671), 1257 of six others .75 (dense with one length
    # for all 1.11). Ten classes of 1257 digits take 16 CPU s for 9, their log loss is .113 for .101
    joint_points: int = 1600
    # from which on these have no more points than many: 5000 rows of 20 columns have a log loss of
    # .279 with 179 (.285 with 100, .282 after 150 passes from equal lengths)
    few_points: int = 16_000
    # the same of labels that may be wrong, of any number of rows: 1001 rows take 1.7 CPU s, as the
    # dense average of 1000 does; five choices of 400 points have log losses of .467 to .471 (a
    # dense average .468), and 10,000 rows have .255 (.316 with 100 points and the mode). Nine sets
    # of 1001 rows have .0015 more than densely in the mean, the worst .007
    points_errors: tuple = (100, 400)
    few_points_errors: int = 32_000
    # that k-means looks at: more move the centres by less than learning does
    k_means: int = 20_000
    # entries of them from which on it goes in single precision, in half the time
    k_means_single: int = 2**20
    # of labels that may be wrong up to which the double loop is the last resort: a step takes n^2
    # numbers and n^3 flops, there a GB and 15 s
    double_loop: int = 2000
    # columns from which distances are cheaper by one matrix product than by differences
    products: int = 7


LIMITS = ProcessLimits()
