"""A child process that never outlives the process that started it.

The rule of this module: whoever starts a long-lived helper process starts it here, so that a parent that dies
by exception, signal or SIGKILL leaves nothing running. Without it every crashed run would leave a server behind.
On Linux the kernel keeps the promise; elsewhere it holds for every end but SIGKILL of the parent, as long as
the owner calls ``end`` at exit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

# Replaces itself by the wanted program after asking the kernel (PR_SET_PDEATHSIG) to kill it when its parent
# dies. A script, not a preexec_fn: Python code between fork and exec can deadlock when the parent has threads.
_LAUNCHER = """\
import os, signal, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
except Exception:
    pass
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One running process; its stdout and stderr are appended to ``log_path``.

    The kernel delivers the parent-death signal when the *thread* that forked ends, so a thread of its own
    starts the process and stays until it is over. ``keep_fd`` stays open in the child, so a ``flock`` on it
    is held until both processes are gone. Raise ``OSError`` when the program cannot be run.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path, keep_fd: int) -> None:
        if sys.platform == "linux" and sys.executable:
            argv = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *argv]
        self._over = threading.Event()
        self._spawned = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None

        def keep() -> None:
            try:
                with log_path.open("ab") as log:
                    self._process = subprocess.Popen(
                        argv,
                        env=env,
                        cwd=cwd,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        umask=0o077,
                        pass_fds=(keep_fd,),
                        start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
                    )
            except OSError as error:
                self._error = error
            finally:
                self._spawned.set()
            self._over.wait()

        threading.Thread(target=keep, name="s3capture-child", daemon=True).start()
        try:
            self._spawned.wait()
        except BaseException:  # a signal handler raised: the process may be there already
            self._spawned.wait()
            self.end(signal.SIGKILL)
            raise
        if self._process is None:
            self._over.set()
            raise self._error or OSError(f"could not start {argv[0]}")

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status (negative: the signal), or None while the process runs."""
        assert self._process is not None
        return self._process.poll()

    def end(self, how: signal.Signals, patience_s: float = 15.0) -> None:
        """Send ``how`` and wait until the process is gone; SIGKILL after ``patience_s``. Idempotent."""
        process = self._process
        try:
            if process is not None and process.poll() is None:
                try:
                    process.send_signal(how)
                    process.wait(patience_s)
                except BaseException as error:
                    process.kill()
                    process.wait()
                    if not isinstance(error, subprocess.TimeoutExpired):
                        raise
        finally:
            self._over.set()
