"""What arms are called after their folders."""

from pathlib import Path

import pytest

from quantpipe.errors import DataError
from quantpipe.serve.arms.arm import arm_names


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/runs/legal"], ("legal",)),
        (["/runs/b"], ("b",)),
        (["/runs/legal", "/runs/base"], ("legal", "base")),
        (["/runs/legal/artifact", "/runs/base/artifact"], ("legal/artifact", "base/artifact")),
        (["/x/runs/artifact", "/y/runs/artifact"], ("x/runs/artifact", "y/runs/artifact")),
        (["/runs/legal", "/runs/legal/"], ("legal-a", "legal-b")),
        (["/runs/a", "/runs/other"], ("a", "other")),
    ],
)
def test_names_are_those_of_folders_and_tell_them_apart(folders: list[str], names: tuple[str, ...]) -> None:
    assert arm_names(list(map(Path, folders))) == names


def test_a_folder_called_like_the_other_arm_is_refused() -> None:
    with pytest.raises(DataError, match="rename it"):
        arm_names([Path("/runs/b"), Path("/runs/other")])
