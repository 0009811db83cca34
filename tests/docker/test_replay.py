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


STAGES = """\
ARG WHICH=one
ARG TAG=t
FROM ${TAG} AS from-one
ENV A=1
FROM other AS from-two
ENV A=2
FROM from-${WHICH}
ARG WHICH
RUN it
"""


@pytest.mark.parametrize(("given", "seen"), [({}, ("1", "one")), ({"WHICH": "two"}, ("2", "two"))])
def test_an_argument_picks_the_stage_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict, seen: tuple
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(replay, "inside", lambda root, command, image, extra: ran.append(image) or 0)
    (tmp_path / "Dockerfile").write_text(STAGES)
    image = replay.build(tmp_path / "Dockerfile", tmp_path, given)
    assert image.environment["A"] == seen[0]
    assert ran == [image]


def test_the_instructions_are_carried_out_as_docker_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def inside(root: Path, command: Sequence[str], image: replay.Image, extra: Any) -> int:
        ran.append((list(command), image.user, image.workdir, {**image.arguments, **image.environment}))
        return 0

    monkeypatch.setattr(replay, "inside", inside)
    root, here = tmp_path / "root", tmp_path / "root/opt/here"
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    root.mkdir()
    image = replay.build(tmp_path / "Dockerfile", root, {"INDEX": "https://x"})

    chown, first, second = ran
    assert chown[0] == ["chown", "-R", "7:7", "/opt/here/as.yml"]
    assert [" ".join(first[0][2].split()), first[1], first[2]] == ["one && two", "0:0", "/opt/here"]
    assert first[0][:2] == ["/bin/bash", "-c"]
    assert first[3] == {"PATH": replay.PATH, "INDEX": "https://x", "NAME": "given", "A": "1", "B": "two words"}
    assert second[:2] == (["/bin/bash", "-c", "three"], "7:7")
    assert (here / "docker/healthcheck.py").is_file()
    assert (here / "as.yml").is_file()
    assert (here / "grafana/dashboards/gpt-oss.json").is_file()
    assert image.arguments == {}, "they are for the build"
    assert (image.entrypoint, image.command, image.healthcheck) == (["entry"], ["serve"], ["check"])
    assert json.loads((root / replay.STATE).read_text())["user"] == "7:7"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("FROM x\nCOPY no/such.file .\n", r"no/such\.file"),
        ("FROM x\nADD a b\n", "ADD"),
        ("FROM x\nRUN false\n", "line 2 ended with exit code 3"),
    ],
)
def test_what_cannot_be_carried_out_ends_it(
    lines: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "inside", lambda *_: 3)
    (tmp_path / "Dockerfile").write_text(lines)
    with pytest.raises(replay.ReplayError, match=words):
        replay.build(tmp_path / "Dockerfile", tmp_path / "root", {})
