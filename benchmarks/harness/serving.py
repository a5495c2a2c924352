"""The request loop of a worker process. Imports the standard library alone, so that any Python can run it.

A request is one line of JSON on stdin, `{"do": METHOD, …arguments}`; its answer is one line of JSON on stdout: the
dictionary that the method returned, or `{"error": "ValueError: …"}`. The other end is `workers.Worker`.
"""

import json
import sys
import traceback
from collections.abc import Callable


def serve(create: Callable) -> None:
    """Answer requests until stdin ends.

    Args:
      create: called with the arguments of the first request, `{"do": "start", …}`; the methods of its result answer
        the later requests. Whatever they print goes to stderr.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        answer = {}
        try:
            if name == "start":
                worker = create(**request)
            else:
                answer = getattr(worker, name)(**request)
        except Exception as error:  # the benchmark reports it and goes on with the other contenders
            traceback.print_exc()
            first_line = (str(error).strip().splitlines() or [""])[0]
            answer = {"error": f"{type(error).__name__}: {first_line}"}
        print(json.dumps(answer), file=answers, flush=True)
