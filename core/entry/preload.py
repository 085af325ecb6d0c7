"""What makes a start shorter: torch's large library loads beside Python's work, and nothing is collected.

Python's imports follow each other whatever threads there are, because each holds the interpreter
lock. Loading a shared library by a foreign call does not hold it. So the part of torch's import that
is libtorch goes on in a thread while the model is found and the tokenizer is read; torch's own import
then finds its library loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_LIBRARY = "lib/libtorch_cpu.so"


def preload_torch() -> threading.Thread | None:
    """Begins to load torch's library, and returns the thread that does.

    The dynamic linker has one lock: imports of modules that need a library wait for torch's. So call
    it when those are done, and let Python's own work follow. Returns None where there is nothing to
    gain: it is loaded, it is not there, one core. Call `prepare_thread_environment` before: the OpenMP
    runtime comes with it, and looks then.
    """
    if "torch" in sys.modules or sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return None
    spec = find_spec("torch")
    path = Path(spec.origin).parent / _LIBRARY if spec and spec.origin else None
    if path is None or not path.is_file():
        return None
    import tokenizers

    # When first used it looks functions up, for which it would wait, too.
    tokenizers.Tokenizer(tokenizers.models.BPE())
    # Not ctypes.CDLL(path), which holds the interpreter lock all the while. An error needs no look:
    # torch's import will meet it, too.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    thread = threading.Thread(
        target=dlopen, args=(os.fsencode(path), os.RTLD_NOW), name="octavo-preload", daemon=True
    )
    thread.start()
    return thread


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Imports make a hundred thousand objects that stay; looking through them for garbage over and
    over takes a tenth of a start."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
