"""The process that a page's Python blocks are run in. Its argument is the descriptor of a connection to the
test, which sends blocks and gets their tracebacks."""

import os
import sys
import traceback
import warnings
from multiprocessing import connection

if __name__ == "__main__":
    page = connection.Connection(int(sys.argv.pop()))
    sys.path[0] = os.getcwd()  # noqa: PTH109
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", ".*is_gradient_checkpointing", FutureWarning
    )  # of transformers, in peft
    while True:
        try:
            name, text = page.recv()
        except EOFError:
            break
        try:
            exec(compile(text, name, "exec"), vars(sys.modules["__main__"]))
            page.send("")
        except BaseException:
            page.send(traceback.format_exc())
