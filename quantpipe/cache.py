"""Where downloads, converted models and compiled kernels are kept between runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$QUANTPIPE_CACHE``, or a folder of the user's own. It may not exist yet."""
    return Path(os.environ.get("QUANTPIPE_CACHE") or Path.home() / ".cache" / "quantpipe")
