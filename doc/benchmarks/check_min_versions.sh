#!/usr/bin/env bash
# Run the test suite on the oldest supported versions of the core dependencies, with table libraries
# of their time: scikit-learn 1.7 reads polars tables by what polars 1.40 deprecates.
#     bash doc/benchmarks/check_min_versions.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=${SKLEARN_EP_MIN_ENV:-.venv-min}
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
python3 -m venv --clear "$environment"
"$environment/bin/pip" install --quiet "numpy==2.2.*" "scipy==1.15.*" "scikit-learn==1.7.0" "joblib==1.4.2" "pytest==8.3.*" "pandas==2.*" "polars<1.40" -e ".[test]"
"$environment/bin/python" -c "import numpy, scipy, sklearn, joblib; print(*(m.__version__ for m in (numpy, scipy, sklearn, joblib)))"
"$environment/bin/python" -m pytest -q "$@"
