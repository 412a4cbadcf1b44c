"""The engine of expectation propagation: pure numerics that know no estimator."""
