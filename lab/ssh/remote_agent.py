"""What runs on a host while ``lab launch`` lives: it starts the command there and ends all of it when the connection ends.

Its text is sent over ssh, so that it is never another version than the terminal's, and needs no more than Python 3.6, whose
absence from the project it must survive to report. Requests come as lines of JSON on its input, a beat among them every few
seconds; when the input closes or falls silent, every process that it has started, in whatever session, is killed. Where the
keeper itself is, its parent does that.

``main`` is called by what ``lab.ssh.hosts.program`` puts together, with the answers of remote_handlers.py.
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time

_ADOPT_ORPHANS, _DIE_WITH_PARENT = 36, 1  # of prctl
_KILL_SECONDS = 10.0
_DRAIN_SECONDS = 5.0
_LONGEST_LINE = 1 << 16
_NOT_FOUND = 127
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class RemoteAgent:
    """``answers`` : functions of one request each, by the request's name; what they return is sent back."""

    def __init__(self, token, answers, silence_seconds):
        self._answers, self._silence_seconds = answers, silence_seconds
        self._requests = queue.Queue()
        self._program = None
        self._sending = threading.Lock()
        self._send_text(token + "\n")  # what came before it was the login shell's

    def serve(self):
        """Do what is asked, until there is nobody to ask."""
        _prctl(_ADOPT_ORPHANS, 1)
        _prctl(_DIE_WITH_PARENT, signal.SIGTERM)
        for number in _ENDING_SIGNALS:
            signal.signal(number, lambda *_: self._leave())
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            request = self._requests.get()
            try:
                self._do(request)
            except Exception as error:  # whatever it is, the one who asks must not wait for ever
                self.send(
                    {"answer": request.get("id"), "error": f"{type(error).__name__}: {error}"}
                )

    def _do(self, request):
        what = request["do"]
        if what == "start":
            self._start(request["command"], request["environment"], request["folder"])
        elif what == "signal":
            if self._program is not None and self._program.poll() is None:
                os.killpg(self._program.pid, request["signal"])  # to its group, as a terminal does
        elif what == "kill":
            end_all(self._program)
        else:

            def answer():
                try:
                    self.send(
                        {"answer": request["id"], "result": self._answers[what](request, self.send)}
                    )
                except Exception as error:
                    self.send(
                        {"answer": request["id"], "error": str(error) or type(error).__name__}
                    )

            threading.Thread(target=answer, daemon=True).start()

    def send(self, message):
        self._send_text(json.dumps(message) + "\n")

    def _send_text(self, text):
        content = text.encode("utf-8", "replace")
        with self._sending:
            while content:
                try:
                    content = content[os.write(1, content) :]
                except OSError:  # nobody listens any more: the input will say so, too
                    return

    def _listen(self):
        """In a thread of its own, since writing waits for a reader, and the network may be cut: take requests, notice silence."""
        rest = b""
        while True:
            ready, _, _ = select.select([0], [], [], self._silence_seconds)
            text = os.read(0, 1 << 16) if ready else b""
            if not text:
                self._leave()
            lines = (rest + text).split(b"\n")
            rest = lines.pop()
            for line in lines:
                request = json.loads(line.decode())
                if request["do"] == "beat":
                    threading.Thread(target=self.send, args=[{"beat": 1}], daemon=True).start()
                else:
                    self._requests.put(request)

    def _leave(self):
        end_all(self._program)
        os._exit(0)

    def _start(self, command, environment, folder):
        here = os.path.dirname(sys.executable)
        environment = dict(environment, **os.environ)
        environment["PATH"] = here + os.pathsep + environment.get("PATH", os.defpath)
        try:
            self._program = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _prctl(_DIE_WITH_PARENT, signal.SIGKILL),
            )
        except OSError as error:
            self.send({"line": f"error: {command[0]}: {error.strerror}"})
            self.send({"ended": _NOT_FOUND, "left": 0})
            return
        relay = threading.Thread(target=self._relay, args=[self._program.stdout], daemon=True)
        relay.start()
        threading.Thread(target=self._watch, args=[self._program, relay], daemon=True).start()

    def _relay(self, output):
        while True:
            line = output.readline(_LONGEST_LINE)
            if not line:
                return
            self.send({"line": line.decode("utf-8", "replace").rstrip("\n")})

    def _watch(self, program, relay):
        """Wait for its end; what it has left behind goes, too, before the end is told."""
        status = program.wait()
        left = end_all(program)
        relay.join(_DRAIN_SECONDS)
        self.send({"ended": status, "left": left})


def end_all(program):
    """Kill all that this process has started and they have started; return how many would not go."""
    deadline = time.time() + _KILL_SECONDS
    while True:
        left = [
            pid for pid in _descendants(os.getpid(), program) if not _signal(pid, signal.SIGKILL)
        ]
        if not left or time.time() > deadline:
            return len(left)
        time.sleep(0.02)


def _descendants(root, program):
    """Living processes that descend from ``root``; dead ones that nobody else will wait for are waited for."""
    children, states = {}, {}
    for pid, parent, state in _processes():
        children.setdefault(parent, []).append(pid)
        states[pid] = state
    found, wave = [], [root]
    while wave:
        wave = [pid for parent in wave for pid in children.get(parent, [])]
        found += [pid for pid in wave if states[pid] not in "ZX"]
    for pid in children.get(root, []):
        if states[pid] == "Z" and (program is None or pid != program.pid):
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
    return found


def _processes():
    """Process, parent and state of all that run."""
    if not os.path.isdir("/proc/self"):
        lines = (
            subprocess.check_output(["ps", "-A", "-o", "pid=,ppid=,stat=,comm="])
            .decode("utf-8", "replace")
            .splitlines()
        )
        rows = [line.split(None, 3) for line in lines]
        return [
            (int(row[0]), int(row[1]), row[2][0])
            for row in rows
            if len(row) == 4 and os.path.basename(row[3]) != "ps"
        ]
    rows = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has just ended
                continue
            rows.append((int(entry), int(fields[1]), fields[0].decode()))
    return rows


def _signal(pid, number):
    """Return whether there is no such process any more."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except OSError:  # of another user: nothing can be done
        pass
    return False


def _prctl(what, value):
    """Linux alone; elsewhere processes in sessions of their own may escape."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(what, value)


def _guard(remote_agent):
    """Wait for the keeper, a child of this process; where it was killed, end what it has left behind, and say so."""
    _prctl(_ADOPT_ORPHANS, 1)
    for number in _ENDING_SIGNALS:
        signal.signal(number, lambda *_: os.kill(remote_agent, signal.SIGTERM))
    ended = 0
    while ended != remote_agent:
        ended, status = os.wait()
    end_all(None)
    if os.WIFSIGNALED(status):
        os.write(1, b'\n{"killed": %d}\n' % os.WTERMSIG(status))


def main(answers):
    """Serve; the first line of the input says with which token to begin and how long a silence may last."""
    first = b""
    while not first.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            return
        first += piece
    spec = json.loads(first.decode())
    remote_agent = os.fork()
    if remote_agent:
        _guard(remote_agent)
    else:
        RemoteAgent(spec["token"], answers, spec["silence_seconds"]).serve()
