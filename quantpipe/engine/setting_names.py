"""What a setting of the engine is called where its user wrote it: recipes say ``engine.block_size``, others do not."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quantpipe.errors import QuantpipeError, RequestError

_KEY = re.compile(r"\bengine\.([a-z_]+)")


@contextmanager
def calling_settings(called: Callable[[str], str]) -> Iterator[None]:
    """Within it, a refusal that says ``engine.<name>`` says ``called(name)`` instead."""
    try:
        yield
    except QuantpipeError as error:
        text = _KEY.sub(lambda found: called(found[1]), str(error))
        if text == str(error):
            raise
        renamed = RequestError(text, error.param) if isinstance(error, RequestError) else type(error)(text)
        renamed.exit_code = error.exit_code
        raise renamed from error
