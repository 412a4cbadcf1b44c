"""What a fitted estimator is made of, in plain values for whoever saves it.

A saved estimator names its public class and nothing else of this package: the posteriors and plans
inside are written as dicts that name their class by a string. So the types that skops asks to trust
have public names only, and reading builds no object of any other package.
"""

import copyreg
import importlib
from typing import Any

_KIND = "__sklearn_ep__"


def packed(value, memo=None):
    """Return a value with the private objects of this package in it as dicts, others untouched.

    What is shared stays shared.
    """
    memo = {} if memo is None else memo
    if type(value) in (list, tuple):
        return type(value)(packed(v, memo) for v in value)
    if type(value) is dict:
        return {k: packed(v, memo) for k, v in value.items()}
    if isinstance(value, type) or not type(value).__module__.startswith("sklearn_ep."):
        return value
    if id(value) not in memo:
        memo[id(value)] = _taken_apart(value, memo)
    return memo[id(value)]


def _taken_apart(value, memo):
    """Return what pickle would keep of an object, as a dict."""
    build, args, state = (*value.__reduce_ex__(4), None)[:3]
    whole = build is not copyreg.__newobj__  # type: ignore[attr-defined]
    kind, args = (build, args) if whole else (args[0], args[1:])
    name = f"{kind.__module__}:{kind.__qualname__}"
    return {
        _KIND: name,
        "called": whole,
        "args": packed(list(args), memo),
        "state": packed(state, memo),
    }


def unpacked(value, memo=None):
    """Return the value that `packed` was given."""
    memo = {} if memo is None else memo
    if type(value) in (list, tuple):
        return type(value)(unpacked(v, memo) for v in value)
    if type(value) is not dict:
        return value
    if _KIND not in value:
        return {k: unpacked(v, memo) for k, v in value.items()}
    if id(value) not in memo:
        memo[id(value)] = _put_together(value, memo)
    return memo[id(value)]


def _put_together(value, memo):
    """Return the object that a dict of `_taken_apart` describes."""
    kind: Any = _class_named(value[_KIND])
    args, state = unpacked(value["args"], memo), unpacked(value["state"], memo)
    new = kind(*args) if value["called"] else kind.__new__(kind, *args)
    if state is None:
        return new
    if hasattr(new, "__setstate__"):
        new.__setstate__(state)
    else:
        vars(new).update(state)
    return new


def _class_named(name):
    """Return a class that this package defines, by module and name; refuse any other.

    What a module of the package only imports is foreign: calling it may do anything.
    """
    module, _, kind = name.partition(":")
    if not module.startswith("sklearn_ep."):
        raise ValueError(f"A saved estimator names {name!r}, which is no class of sklearn-ep.")
    found = getattr(importlib.import_module(module), kind, None)
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"A saved estimator names {name!r}, which this version does not have.")
    return found
