"""What every estimator shares with scikit-learn: checks, callbacks, fitting, prediction."""
