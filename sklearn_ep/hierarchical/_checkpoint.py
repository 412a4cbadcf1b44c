"""Checkpoints of a fit: plain arrays, written whole or not at all, tied to their data."""

import hashlib
import os
import zipfile

import numpy as np

from ._factors import group_keys

__all__ = ["checked_state", "digest", "load_checkpoint", "save_checkpoint", "state_of"]

STATE = "site_precision", "site_shift", "prior_precision", "prior_shift", "partition", "group_keys"


def state_of(messages, prior, site, labels):
    """Return the arrays, named as in `STATE`, from which a fit can go on."""
    values = *messages, *prior, np.asarray(site), group_keys(labels)
    return dict(zip(STATE, values, strict=True))


def checked_state(state):
    """Return the arrays of a state, of one factor or of several, or raise a ValueError."""
    if "theta" in state:  # several factors: sites at the mode of theta
        return {name: np.array(value) for name, value in state.items()}
    missing = [name for name in STATE if name not in state]
    if missing:
        raise ValueError(f"state lacks {missing}.")
    return {name: np.array(state[name]) for name in STATE}


def digest(*arrays):
    """Return a hash (hex) of the contents and shapes of arrays."""
    out = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        out.update(f"{array.dtype.str}{array.shape}".encode())
        out.update(array.data if array.dtype.kind != "U" else array.tobytes())
    return out.hexdigest()


def save_checkpoint(path, state, fingerprint):
    """Write a state so that a reader sees the old file or the new one, never a part of it.

    The name of the intermediate file is fixed: what a killed process left behind is overwritten by
    the next.
    """
    partial = f"{os.fspath(path)}.partial"
    try:
        with open(partial, "wb") as file:
            np.savez(file, fingerprint=np.array(fingerprint), **state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def load_checkpoint(path, fingerprint):
    """Return the state in a checkpoint, or None where there is no file.

    A ValueError says that the file is no checkpoint, or belongs to other data or to another model:
    it is neither used nor overwritten.
    """
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            state = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"checkpoint={os.fspath(path)!r} cannot be read as a checkpoint."
        ) from error
    if str(state.pop("fingerprint", "")) != fingerprint:
        raise ValueError(
            f"checkpoint={os.fspath(path)!r} belongs to other data or to another model; "
            "remove it or give another path."
        )
    return state
