"""The only place that knows versions of scikit-learn: callbacks, with stand-ins before 1.9."""

from .annotations import Method

try:
    from sklearn.callback import CallbackSupportMixin
    from sklearn.callback import with_callbacks as _with_callbacks
except ImportError:  # scikit-learn < 1.9

    class _NoContext:
        """Context of a fit that nobody watches."""

        def subcontext(self, **kwargs):
            return self

        def call_on_fit_task_begin(self, **kwargs):
            return self

        def call_on_fit_task_end(self, **kwargs):
            return False

    class CallbackSupportMixin:  # type: ignore[no-redef]
        """Stand-in that offers the hook and calls nobody."""

        def _init_callback_context(self, **kwargs):
            return _NoContext()

    def _with_callbacks(method):
        return method


def with_callbacks(method: Method) -> Method:
    """Let a fit tear down its callbacks at the end; unchanged where there are none."""
    return _with_callbacks(method)
