"""The server as it is, in front of an engine that does not compute.

    python bench/servers/null_front.py TOKENIZER PORT

TOKENIZER is a model folder; nothing but its tokenizer and chat template is read.
"""

import asyncio
import gc
import sys
from functools import partial
from pathlib import Path

import uvicorn

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.admission.limits import Limits
from quantpipe.serve.app import create_app
from quantpipe.serve.arms.arm import Arm
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.engine_process.launch import launch_engine
from quantpipe.serve.engine_process.messages import Opening
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.http_config import uvicorn_config
from quantpipe.serve.server import bind

MAX_OPEN_PROMPTS = 4096
NULL_ENGINE = Path(__file__).with_name("null_engine.py")


async def serve(folder: Path, port: int) -> None:
    engine = EngineClient(Opening(b""), MAX_OPEN_PROMPTS, launch=partial(launch_engine, (str(NULL_ENGINE),)))
    try:
        await engine.start()
        options = FrontOptions(Limits(max_open_prompts=MAX_OPEN_PROMPTS))
        app = create_app([Arm("a", "null", engine, Tokenizer.open(folder))], "null", options=options)
        gc.freeze()
        with bind("127.0.0.1", port) as listener:
            await uvicorn.Server(uvicorn_config(app, options, grace_s=5)).serve(sockets=[listener])
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
