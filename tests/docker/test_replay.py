"""docker/replay.py does with a Dockerfile's instructions what docker does, as far as it goes without a chroot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is missing: make setup")

from docker import replay

DOCKERFILE = """\
ARG BASE=anything
FROM ${BASE}
ARG INDEX
ARG NAME=given
SHELL ["/bin/bash", "-c"]
WORKDIR /opt
WORKDIR here
ENV A=1 B="two words"
COPY docker/healthcheck.py docker/
COPY --chown=7:7 docker/prometheus.yml as.yml
COPY docker/grafana grafana
RUN one \\
    && two
USER 7:7
RUN three
HEALTHCHECK --interval=1s CMD ["check"]
ENTRYPOINT ["entry"]
CMD ["serve"]
"""


@pytest.fixture
def carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[replay.Image, Path, list[Any]]:
    ran: list[Any] = []

    def inside(root: Path, command: Sequence[str], image: replay.Image, extra: Any) -> int:
        ran.append((list(command), image.user, image.workdir, {**image.arguments, **image.environment}))
        return 0

    monkeypatch.setattr(replay, "inside", inside)
    file, root = tmp_path / "Dockerfile", tmp_path / "root"
    file.write_text(DOCKERFILE)
    root.mkdir()
    return replay.build(file, root, {"INDEX": "https://x"}), root, ran


def test_commands_run_in_their_order_as_the_user_and_in_the_folder_of_their_place(carried_out) -> None:
    _, _, ran = carried_out
    chown, first, second = ran
    assert chown[0] == ["chown", "-R", "7:7", "/opt/here/as.yml"]
    assert [" ".join(first[0][2].split()), first[1], first[2]] == ["one && two", "0:0", "/opt/here"]
    assert first[0][:2] == ["/bin/bash", "-c"]
    assert first[3] == {"PATH": replay.PATH, "INDEX": "https://x", "NAME": "given", "A": "1", "B": "two words"}
    assert second[:2] == (["/bin/bash", "-c", "three"], "7:7")


def test_copies_lie_where_docker_puts_them(carried_out) -> None:
    _, root, _ = carried_out
    here = root / "opt/here"
    assert {p.relative_to(here).as_posix() for p in here.rglob("*") if p.suffix in (".py", ".yml")} == {
        "docker/healthcheck.py",
        "as.yml",
    }
    assert (here / "grafana/dashboards/gpt-oss.json").is_file()


def test_an_image_is_left_without_what_was_for_its_build(carried_out) -> None:
    image, root, _ = carried_out
    assert image.arguments == {}
    assert (image.entrypoint, image.command, image.healthcheck) == (["entry"], ["serve"], ["check"])
    assert json.loads((root / replay.STATE).read_text())["user"] == "7:7"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("FROM x\nCOPY no/such.file .\n", "there is no such file in the repository"),
        ("FROM x\nADD a b\n", "this replay knows no ADD"),
        ("FROM x\nRUN false\n", "line 2 ended with exit code 3: RUN false"),
    ],
)
def test_what_cannot_be_carried_out_ends_it_in_words(
    lines: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "inside", lambda *_: 3)
    (tmp_path / "Dockerfile").write_text(lines)
    with pytest.raises(replay.ReplayError, match=sentence):
        replay.build(tmp_path / "Dockerfile", tmp_path / "root", {})
