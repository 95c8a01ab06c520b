"""A test helper that finds out whether a function keeps Python's interpreter lock while it runs."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable


def keeps_interpreter_lock(call: Callable[[], object], times: int = 3000) -> bool:
    # Call `call` many times while another thread waits for the interpreter lock, which it gets only
    # if a call gives the lock up: the switch interval ends after the test.
    turns, is_over = [0], False

    def take_turns() -> None:
        while not is_over:
            turns[0] += 1
            time.sleep(0)

    interval_s = sys.getswitchinterval()
    thread = threading.Thread(target=take_turns)
    gc.collect()
    # Objects that other tests have left may release the interpreter lock as they are freed.
    gc.disable()
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        before = turns[0]
        for _ in range(times):
            call()
        return turns[0] == before
    finally:
        is_over = True
        gc.enable()
        sys.setswitchinterval(interval_s)
        thread.join()
