"""The only place that knows versions of scikit-learn: callbacks, with stand-ins before 1.9."""

try:
    from sklearn.callback import CallbackSupportMixin, with_callbacks
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

    def with_callbacks(method):
        """Return the method unchanged: there is nothing to tear down."""
        return method
