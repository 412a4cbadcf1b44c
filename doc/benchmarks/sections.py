"""What the page of benchmarks says of each script: in which order, and in words."""

from typing import NamedTuple

__all__ = ["PARTS"]


class Section(NamedTuple):
    """One script: its title for readers, what the data are, and what the stored run shows."""

    script: str
    title: str
    data: str
    found: str


PARTS = {
    "Are the probabilities right?": [
        Section(
            "arena",
            "All defaults on 26 real sets",
            "Sets of the collection of Raetsch and others, of the UCI repository and of "
            "scikit-learn, 43 to 500 training rows, two or three classes, five splits. Columns "
            "are standardised, six sets are tables with categories. Peers run in the form that "
            "tunes itself, LightGBM and CatBoost at their defaults. CatBoost runs on 16 sets, "
            "since on sets of many columns a fit takes up to 22 CPU seconds. Peers on sets of "
            "numbers are of earlier runs of the same splits. Rows without losses of splits in the "
            "JSON count as level within .005.",
            "The stacked classifier at its defaults has the lowest mean rank by log loss, 2.3 of "
            "thirteen models (1.9 to 2.7 over bootstrapped sets). Among the peers alone its mean "
            "rank is 1.7. It is level with the best peer on 23 of 26 sets. The Gaussian process "
            "alone has 4.4, the best peer, that of scikit-learn, 7.0. Others lead on three. "
            "Support vectors lead on ionosphere (.165 against .198) and on breast cancer of "
            "Ljubljana (.525 against .543), logistic regression on iris (.075 against .103; over "
            "twenty splits .067 against .081). On splice boosting has .142 and the stack .143; "
            "CatBoost, which is not in the table there, had .134 in 22 CPU seconds a fit. On two "
            "sets of 43 and 71 training rows and thousands of genes the stack is level only "
            "because few rows are tested: colon .389 against .353 of logistic regression (over "
            "twenty splits .426 against .438), prostate tumours .325 against .276 of boosting. A "
            "fit of the stack takes .52 CPU seconds in the mean, 2.4 times that of the process; "
            "one of LightGBM .06, of tuned boosting 1.3.",
        ),
        Section(
            "calibration",
            "Do intervals cover what they say?",
            "Data drawn from each model's own prior, with hyperparameters known, drawn from their "
            "priors and learned, and fixed and learned; rates of wrong labels fixed at .2 and .1.",
            "262 of 273 figures lie within 2.6 standard errors of what is stated, or within .05 "
            "at a fixed truth, where no exact posterior is nominal. Errors within a data set are "
            "correlated, so that sets count as independent and not rows. Outside at truths from "
            "the priors: "
            "50 % intervals with wrong labels at a known rate, .462: EP is a little too sure "
            "there. Outside at fixed truths: 50 % intervals of group effects at a scale of .5, "
            ".44 and .45, as those of the exact posterior (see crossed factors below), and .44 of "
            "nested factors; and with "
            "wrong labels at the defaults 50 % intervals, .56 and .57, and 90 % intervals where "
            "a fifth is wrong, .96. Stated probabilities of wrong labels are right within .03 "
            "up to .85 where a fifth of the labels is wrong, which the default expects, and "
            "with hyperparameters='integrate' where a tenth is; of the default's flags of .42 "
            "and .73 only .29 and .52 are right there.",
        ),
        Section(
            "averages",
            "What averages over hyperparameters bring and cost",
            "Thirteen real sets of two classes with 100 to 250 training rows, five splits.",
            "Averages of the Gaussian process over lengths of the columns lower the log loss from "
            ".360 to .342 in the mean, at 1.9 times the CPU of the mode (1.6 to 2.4); with one "
            "length for all columns they are level. What they gain is where few columns matter "
            "(splice .421 to .297, image .206 to .130); crabs, heart and german lose .003 to .010. "
            "With label errors it is .384 to .366 at 3.2 times, for the linear model .437 to .436 "
            "at 2.4 times.",
        ),
        Section(
            "dense_gpc",
            "Gaussian processes: EP against Laplace",
            "Generated rows with ten columns and 5 % random labels, 2000 held-out rows, the same "
            "kernel and start for both.",
            "EP has the lower log loss at seven of eight sizes (.341 against .358 at 250 rows). "
            "With one length scale it takes .5 to .7 of the CPU time of scikit-learn's "
            "classifier, and .2 of it with a length scale for each column. At 4000 "
            "rows both are level.",
        ),
        Section(
            "classes",
            "More than two classes",
            "Iris, wine, digits and generated sets of three to ten classes.",
            "A joint posterior has a lower log loss than one against the rest on five of seven "
            "sets, for the Gaussian process (six classes .684 against .718, digits .101 against "
            ".117; topics .911 against .890) at .4 to 1.4 times its CPU time, and for the linear "
            "model (digits .076 against .142; rings 1.384 against 1.332) at .2 to 2.4 times. "
            "LogisticRegressionCV leads on digits (.069) and is level with the joint linear model "
            "on iris and waves, at a fraction of the price where classes are many; on topics the "
            "joint linear model has .203, LogisticRegressionCV .221.",
        ),
        Section(
            "relaxed",
            "Labels that are wrong",
            "Heart, Haberman, Pima, diabetes and a generated set, half of each for training; "
            "training labels are exchanged with probability 0 to .3.",
            "With wrong labels the log loss is well below that of a Gaussian process that trusts "
            "every label, except on Haberman, where minority rows among the other class pass for "
            "wrong labels. The flags find wrong labels at least as well as the five fits of "
            "cleanlab do, except on generated data at 30 %. What helps is the learned rate of "
            "errors and the latent noise; relaxing the moments, the idea of the paper, does not "
            "lower the error.",
        ),
    ],
    "Linear models": [
        Section(
            "spike_slab",
            "Sparse regression: support, error and time",
            "Generated compressed sensing with 200 and 500 columns, noise variance .01, everything "
            "learned; riboflavin and eye data by folds.",
            "Where LassoCV has twice to a hundred times the test error of the best model, spike "
            "and slab is at the best subset's, and states the probability of each column. Best "
            "subsets (abess) err as little where few columns count, in a fraction of the time and "
            "without a posterior; they lose their way earlier as more columns count.",
        ),
        Section(
            "spike_slab_posterior",
            "Sparse regression: the exact posterior",
            "Eye data (120 x 200) in five folds and riboflavin (71 x 4088) in two, standardised. "
            "The exact posterior by two Metropolis chains over the columns that are in, from the "
            "empty model and from many columns.",
            "On eye data the average over hyperparameters errs as the exact posterior does (.470; "
            "chains .473 and .459) and less than LassoCV (.535). On riboflavin it errs less than "
            "the chains (.41 against .53 and .50), which do not agree on the density and have not "
            "mixed, and more than LassoCV (.343): it is the model that falls short there, columns "
            "of which few count, not its approximation.",
        ),
        Section(
            "fine_mapping",
            "Fine mapping: correlated columns beside SuSiE",
            "574 people and 1,001 genetic variants of real correlation, 200 replicates of 1 to 5 "
            "normal effects at random variants, with .02 to .4 of the variance; SuSiE is pysusie.",
            "Log loss of inclusion is 13.3 a replicate, SuSiE's 17.5 with its zeros taken for "
            "1e-6. Inclusions sum to 1.06 of the true effects, SuSiE's to 1.66. Below .1 they "
            "state 402 effects where there are 359, 2.1 standard deviations of independent "
            "columns and 1.4 of replicates; from .1 to .2 44 where there are 59 (2.4); the other "
            "tenths are within two. SuSiE states 769 for 380 below .1. Credible sets of level .95 "
            "have a median of 3 columns, as SuSiE's have; .982 of 227 hold an effect where they "
            "state .979, and SuSiE's state .980 where .966 of 238 do: a set of one column is "
            "surer than its level, so that calibrated sets cover more often than it. At lower "
            "levels sets cover as often as they state too: .945 for .955, .89 for .90, .84 for "
            ".84 and .69 for .68 at levels of .9, .8, .7 and .5. They find .377 of all effects at "
            "level .95, SuSiE's .388; at the level at which a tenth of the sets is false, .380 "
            "and .388. Power at a common threshold of columns with a tenth false is .148, SuSiE's "
            ".142. A default fit takes 5.6 times SuSiE's CPU on eight replicates in turns. The "
            "rows of methods are from runs of their own.",
        ),
        Section(
            "sparse_logistic",
            "Logistic regression with 40,000 columns",
            "Simulated text of 70 nonzero entries a row; a9a, movie reviews and news on real sets.",
            "A posterior with variances takes 1.2 times the CPU time of lbfgs run to convergence "
            "at the same prior, and has the lower log loss (.4415 against .4515). scikit-learn's "
            "default tolerance stops lbfgs after a sixth of that time, where its log loss happens "
            "to be as low (.4408), with twice the calibration error.",
        ),
        Section(
            "imaging",
            "Compressed sensing: a standard deviation for each pixel",
            "Images of 32 to 128 pixels a side, measured through half (upper rows) or three tenths "
            "(lower rows) of their Fourier coefficients, low ones more often, with noise .02; "
            "Laplace priors on wavelets and differences. Exact posterior by Gibbs sampling.",
            "At 32 x 32 the Kullback-Leibler bound has .96 and .97 of the exact standard "
            "deviations (the local bound .83) for a thousandth of the time. Its 90 % intervals "
            "cover .89 and .91 of the pixels, exact ones .91 and .91. How standard deviations "
            "differ from pixel to pixel it knows in part only: their logarithms correlate by .34 "
            "and .55 with the exact ones, since 16 samples carry an error of a third each. Three "
            "tenths of the coefficients are too few at 32 x 32: the prior fills in what was not "
            "measured, and intervals cover .63. An image of 128 x 128 takes 4.6 seconds and 2,000 "
            "products.",
        ),
        Section(
            "streams",
            "A stream of a million sparse rows",
            "Rows of 50 among 100,000 columns, drawn by a power law, in batches of 200 that are "
            "never kept; log loss of the next batch before it is learned from.",
            "Over the last half .475, where the best of three learning rates of SGDClassifier has "
            ".519 in an eighth of the CPU time. Memory does not grow.",
        ),
        Section(
            "partitions",
            "Linear models from partitions",
            "Generated rows in parts, one and two workers.",
            "The answer has the same bits for any number of workers. Two take .64 to .73 of the "
            "wall time of one on two idle cores. The spike and slab sees its rows once and takes "
            "1.2 times as long. What travels is counted in bytes; "
            ":doc:`scaling_out` has the table.",
        ),
    ],
    "Groups": [
        Section(
            "hierarchical",
            "One grouping factor",
            "The simulated experiments of Gelman and others (2014), and four real sets by folds.",
            "Means, standard deviations and group scale agree with long chains; :doc:`papers` has "
            "the paper's figures over twelve seeds, beside GPBoost. Groups lower the log loss on "
            "all four real sets.",
        ),
        Section(
            "groups_posterior",
            "Crossed factors: the exact posterior",
            "600 rows with 30 and 12 crossed levels, forty sets with scales drawn from their prior "
            "and forty with scales of one half; Gibbs sampling gives the exact posterior.",
            "Intervals of 50 and 90 % cover what the exact ones do, to .004, over draws from the "
            "prior, scales of ten and more included. So they do at the fixed scale, where both "
            "cover .45 and .87: one true value is no draw from the prior. Standard deviations of "
            "effects agree to a quarter of a percent in the median, for a tenth of the time.",
        ),
        Section(
            "crossed",
            "Several grouping factors",
            "Persons and items (verbal aggression), mothers in communities (prenatal care), and "
            "generated users and items up to a million rows.",
            "A million rows with 100,000 users and 10,000 items take 13 CPU seconds, and the logs "
            "of both scales are right to .004. At 10,000 and 100,000 rows GPBoost takes three to "
            "twelve times as long, with log scales .02 to .08 lower; statsmodels a thousand times. "
            "A second factor lowers the log loss of verbal aggression from .521 to .512 and that "
            "of prenatal care, where mothers have one to three children, from .510 to .385.",
        ),
        Section(
            "multilevel",
            "Multilevel models beside lme4, glmmTMB, glmm, mixedlm and GPBoost",
            "Persons and items (verbal aggression), women in districts (contraception), mothers in "
            "communities (prenatal care), 73,421 ratings of lecturers in departments (InstEval), "
            "students in schools in regions and crossed levels (simulated). One process a fit, one "
            "thread. A Gibbs chain of 12,000 draws of the same model and priors is the truth for "
            "the first two.",
            "Against the chain the log scales of verbal aggression are .05 posterior standard "
            "deviations off, those of the peers .90; of contraception .014 and .16. Peers give "
            "maxima of a likelihood, so that their distance is not the error of Laplace alone. "
            "InstEval takes glmm 16 and glmmTMB 30 times as long as the default here, whose "
            "scales lie within 14 % of theirs. On the other sets glmm is the fastest: 1.4 times "
            "on verbal aggression, three times on nested students, four times on crossed levels, "
            "thirty times where 1558 mothers have one to four births and are integrated exactly "
            "here. lme4, mixedlm and glmmTMB are slower, but for glmmTMB and GPBoost on nested "
            "students and prenatal care.",
        ),
    ],
    "Many rows": [
        Section(
            "sparse_gpc",
            "Inducing points against stochastic variational inference",
            "Odd against even digits of MNIST, 200 inducing points, minibatches of 200 or 1000, "
            "a length scale a pixel.",
            "Five epochs of EP end at a log loss of .053 in 22 CPU seconds, 24 epochs of batches "
            "of 1000 at .051 in 38. GPyTorch's variational process with natural gradients has "
            ".091 and .066 after twice that time, at step rates that were not tuned further.",
        ),
        Section(
            "out_of_core",
            "Rows in files larger than memory",
            "2 GB of generated rows as a memory map, and as functions that read.",
            "A fit takes 155 MB of private memory of its own for the map, 337 MB for functions.",
        ),
        Section(
            "memory",
            "Peak memory",
            "The large fits, each in a process of its own.",
            "Peak memory is within a small factor of what the method has to hold.",
        ),
        Section(
            "speedup",
            "Time against workers",
            "200,000 to 400,000 generated rows in four parts that workers read from memory maps; "
            "two processes and two dask workers on two cores. Beyond two the time is computed: CPU "
            "seconds a row of one process, and bytes at 1 GB/s, for a billion rows.",
            "Two processes take .68 to .75 of the wall time of one, two dask workers that keep "
            "their memory .68 to .90. With dask's own settings, by which freed memory goes back to "
            "the system at once, they take .88 to 2.3 times that of one process. What travels for "
            "each row, 29 and 44 bytes in models with sites on rows, ends the gain at fifty to "
            "seventy times; the linear model sends none and would go on.",
        ),
        Section(
            "cluster",
            "A worker dies",
            "Fits over partitions on two dask workers, one of which is killed; a process killed "
            "and resumed from its checkpoint.",
            "The fit ends with the same answer: to the last bit after a worker's death, to 7e-13 "
            "standard deviations from a checkpoint.",
        ),
    ],
    "Which label next?": [
        Section(
            "active_learning",
            "Error and log loss against labels",
            "Five seeds, 10 to 200 labels. Linear model: pools of 400 rows of eight sets, of "
            "16,000 of a9a and of generated text, and of 8000 review sentences; there look-ahead "
            "scores count at 50 reference rows. Gaussian process: three sets. The same classifier "
            "for all "
            "strategies; those of scikit-activeml are refitted after every label up to 60, then "
            "after every fifth.",
            "Areas under the curves over those of random rows, linear model, error and log "
            "loss: the default (epig_entropy) .81 and .91, our uncertainty with labels fed back "
            ".75 and .93, scikit-activeml's entropy .77 and .93, its BatchBALD .83 and .92, "
            "CoreSet .99 and 1.00. Uncertainty leads in error, look-ahead scores and BALD in log "
            "loss; on heart, german and image the default has 1.05, 1.02 and 1.03 in log loss, on "
            "image scikit-activeml's entropy is ahead of it in both (.80 and 1.00 to .90 and "
            "1.03). Gaussian process: the default .84 and .91, entropy .95 and 1.03, BatchBALD "
            ".91 and .96. In large pools little is gained with "
            "200 labels: a9a .98 and 1.00 for the default, .98 and 1.01 for uncertainty, review "
            "sentences 1.01 and 1.00, .99 and 1.00, generated text .98 and 1.00, .95 and 1.00. "
            "The prior variance matters most for the log loss. With the default strategy on "
            "heart, german and digits it is 1.37, 1.29 and .50 at the mode, and 1.04, 1.07 and "
            ".80 with a fixed variance. It is 1.02, .99 and .73 averaged, and 1.06, 1.01 and .33 "
            "averaged and calibrated. Random rows with a fixed variance are 1. On 800 review "
            "sentences it is 1.00 to 1.02 whatever is done.",
        ),
    ],
    "Does anything break it?": [
        Section(
            "fuzz",
            "Ten thousand hostile fits",
            "Random settings on finite data with scales from 1e-160 to 1e160, far origins, copies, "
            "constant columns and huge weights.",
            "Every fit ends in finite numbers or in an error that names its argument, and one that "
            "cannot depend on units does not. What earlier runs found is in the tests.",
        ),
    ],
}
