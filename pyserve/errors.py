"""Every error that reaches a user: one clear message, the HTTP status and the `type` that clients know."""

from __future__ import annotations


class PyserveError(Exception):
    """An error with a message for the user. `param` names the field of the request at fault."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def extra(self) -> dict[str, int]:
        """Further members of the error object."""
        return {}


class InvalidRequest(PyserveError):
    status = 400
    type = "invalid_request_error"


class ContextExceeded(PyserveError):
    """A prompt that can never fit. All figures in tokens."""

    status = 400
    type = "exceed_context_size_error"

    def __init__(self, message: str, *, n_prompt_tokens: int, n_ctx: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx

    def extra(self) -> dict[str, int]:
        return {"n_prompt_tokens": self.n_prompt_tokens, "n_ctx": self.n_ctx}


class PoolExhausted(PyserveError):
    """A sequence had to end for lack of room: alone too long for the pool, or, with parking off, the largest (R25)."""

    @classmethod
    def because(cls, reason: str, pool_tokens: int) -> PoolExhausted:
        """`reason`: that of a planned failure, never_fits or pool_full."""
        if reason == "never_fits":
            why = f"this conversation cannot fit in the pool of {pool_tokens} tokens even alone"
        else:
            why = f"the pool of {pool_tokens} tokens is full and parking is off (--preempt-ram 0)"
        return cls(f"Context size has been exceeded: {why}; raise --ctx-size")


class StepFailed(PyserveError):
    """The sequence was in a step that the device could not finish (R26)."""


class BrokenLogits(PyserveError):
    """The model gave nothing to pick a token from: a logit was NaN, or the largest was not finite."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite, so that no token can be picked: its weights are damaged, a kernel is "
            "at fault, or logit_bias bans every token"
        )


class AuthenticationFailed(PyserveError):
    status = 401
    type = "authentication_error"


class NotFound(PyserveError):
    status = 404
    type = "not_found_error"


class MethodNotAllowed(PyserveError):
    status = 405
    type = "invalid_request_error"


class NotSupported(PyserveError):
    status = 501
    type = "not_supported_error"


class Unavailable(PyserveError):
    """Loading, draining, or the queue is full. `retry_after_s` goes into the Retry-After header."""

    status = 503
    type = "unavailable_error"

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelFileError(PyserveError):
    """A model file or folder that cannot be served; the message is one line that names what is wrong."""


class SettingsError(PyserveError):
    """A flag or PYSERVE_* variable with a value that cannot be used."""
