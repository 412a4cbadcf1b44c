"""Which of scikit-learn's checks are asked of one setting of each estimator alone."""

# What takes rows, labels and weights in, and whether a fit was made, is one code for all settings
# of an estimator. Checks of what a fit leaves behind are asked of all: they depend on its way.
OF_INPUT = {
    "check_classifier_data_not_an_array",
    "check_classifiers_classes",  # labels that are numbers are asked of all
    "check_dtype_object",
    "check_estimator_sparse_array",
    "check_estimators_fit_returns_self",
    "check_estimators_nan_inf",
    "check_estimators_pickle(readonly_memmap=True)",
    "check_f_contiguous_array_estimator",
    "check_fit2d_predict1d",
    "check_fit_check_is_fitted",
    "check_fit_score_takes_y",
    "check_methods_sample_order_invariance",  # each row alone is asked of all
    "check_n_features_in",
    "check_n_features_in_after_fitting",
    "check_pipeline_consistency",
    "check_positive_only_tag_during_fit",
    "check_regressor_data_not_an_array",
    "check_regressors_int",
    "check_sample_weights_list",
    "check_sample_weights_not_an_array",
    "check_sample_weights_pandas_series",
    "check_sample_weights_shape",
    "check_supervised_y_2d",
}

# The setting of each estimator that fits fastest; others of the same estimator are not asked.
ASKED = (
    "EPGaussianProcessClassifier(method='sparse'",
    "RelaxedEPClassifier(label_noise",
    "SpikeSlabRegressor(noise_variance",
    "SpikeSlabClassifier(hyperparameters='mode'",
    "ConvexVariationalLogistic(prior='laplace'",
    "ConvexVariationalRegressor()",
    "HierarchicalEPLogistic()",
    "BayesianStackingClassifier(",
)


# Checks of how rows are predicted and which classes there are. Fits of partitions have that code
# from those of all rows, and both processes have the same averages.
OF_PREDICTIONS = {
    "check_classifiers_train",
    "check_decision_proba_consistency",
    "check_methods_subset_invariance",
}
SHARING = "HierarchicalEPLogistic(n_partitions", "RelaxedEPClassifier(kernel"


def is_asked_twice(setting, check):
    """Return whether a common check takes long and others ask the same.

    Weights of classes are those of rows, for which minibatches would run a thousand epochs. Rows
    in a file, in single precision and of sparse arrays have checks that stay.
    """
    if check == "check_classifiers_train" and "adam" in setting:
        return True
    if check in OF_PREDICTIONS and setting.startswith(SHARING):
        return True
    if check == "check_class_weight_classifiers":
        return any(k in setting for k in ("adam", "(kernel", "VariationalLogistic()"))
    if check.startswith(("check_classifiers_train(readonly_memmap", "check_estimator_sparse_mat")):
        return True
    return check in OF_INPUT and not setting.startswith(ASKED)
