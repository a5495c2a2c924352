"""Worker processes, and the loop that they serve requests with."""

import io
import json
import sys

from attnlab._benchmarks.harness import serving, workers


def test_workers_alternate(tmp_path, capsys):
    program = "import json\nwhile True: print(json.dumps(eval(input().replace('null', 'None'))), flush=True)"
    started = [workers.Worker([sys.executable, "-c", program], tmp_path / name) for name in "ab"]
    answers = workers.alternate(dict(zip("ab", started)), "echo", 2, "small", steps=3)
    assert answers == dict.fromkeys("ab", [{"do": "echo", "steps": 3}] * 2)
    assert "small: round 2 of 2" in capsys.readouterr().out
    assert started[0].peak_mib is None or started[0].peak_mib > 1
    for worker in started:
        worker.close()
        assert worker.process.returncode is not None


def test_serve_answers_requests_and_survives_errors(monkeypatch, capsys):
    class Adder:
        def __init__(self, first):
            self.first = first

        def add(self, second):
            print("not an answer")
            return {"sum": self.first + second}

    requests = [{"do": "start", "first": 1}, {"do": "add", "second": "x"}, {"do": "add", "second": 2}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(request) + "\n" for request in requests)))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which `serve` replaces
    serving.serve(Adder)
    captured = capsys.readouterr()
    started, failed, answered = map(json.loads, captured.out.splitlines())
    assert started == {} and answered == {"sum": 3}
    assert failed["error"].startswith("TypeError: unsupported operand")
    assert "not an answer" in captured.err and "Traceback" in captured.err
