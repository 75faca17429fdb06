"""What of serving needs no JetStream: text in pieces,
and what is said where JetStream is missing.
"""

import importlib
import random
import sys

import pytest
import tokenizers

import rl_speed.serving
from rl_speed.serving import TextStream
from rl_speed.serving.text import REPLACEMENT

TEXTS = (
    "caf\u00e9 na\u00efve",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f600\U0001f469\u200d\U0001f680 ok",
    "  two  spaces ",
    "1+1=2",
)


def byte_level():
    """Every byte a token, some words too, as in GPT-2, Qwen and Llama 3."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    core.decoder = tokenizers.decoders.ByteLevel()
    return core


def byte_fallback():
    """Pieces that carry their space in front, and bytes for what is not in the vocabulary,
    as in Llama 2: the first space goes.
    """
    pieces = [
        "<unk>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "\u2581",
        "\u2581two",
        *"abcdefghijklmnopqrstuvwxyz1+=2",
    ]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={t: i for i, t in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    core.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    d = tokenizers.decoders
    core.decoder = d.Sequence(
        [d.Replace("\u2581", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
    )
    return core


def streamed(decode, ids, draw):
    stream, pieces, rest = TextStream(decode), [], list(ids)
    while rest:
        take = draw.randrange(1, 3)
        pieces.append(stream.push(rest[:take]))
        rest = rest[take:]
    return "".join([*pieces, stream.end()])


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_pieces_add_up_to_the_decoded_text(make):
    core, draw = make(), random.Random(0)
    cases = [core.encode(text).ids for text in TEXTS]
    assert [core.decode(ids) for ids in cases] == [
        t[make is byte_fallback and t[0] == " " :] for t in TEXTS
    ]
    # What a policy may write: bytes that are no characters, and responses cut inside of one.
    if make is byte_level:
        cases += [
            [draw.randrange(core.get_vocab_size()) for _ in range(draw.randrange(1, 30))]
            for _ in range(200)
        ]
        cases += [ids[:cut] for ids in cases[:5] for cut in range(len(ids))]
    for ids in cases:
        assert streamed(core.decode, ids, draw) == core.decode(ids)


def test_byte_fallback_keeps_the_characters_that_were_whole():
    core, draw = byte_fallback(), random.Random(1)
    for text in TEXTS:
        ids = core.encode(text).ids
        for cut in range(len(ids)):
            said = streamed(core.decode, ids[:cut], draw).rstrip(REPLACEMENT)
            whole = bytes(b for i in ids[:cut] for b in as_bytes(core.id_to_token(i))).decode(
                "utf-8", "ignore"
            )
            assert said == whole.removeprefix(" ")


def as_bytes(piece):
    """What a piece of `byte_fallback` stands for."""
    return (
        bytes([int(piece[3:5], 16)])
        if piece.startswith("<0x")
        else piece.replace("\u2581", " ").encode()
    )


def test_whole_characters_come_at_once_and_halves_never():
    core = byte_level()
    for text in TEXTS:
        stream = TextStream(core.decode)
        pieces = [stream.push([i]) for i in core.encode(text).ids]
        assert [p for p in pieces if p] == list(text) and stream.end() == ""
    stream = TextStream(core.decode)
    assert [stream.push([i]) for i in core.encode("\u4f60").ids[:2]] == ["", ""]
    assert stream.end() == REPLACEMENT and stream.end() == ""


def test_missing_jetstream_is_said_when_it_is_needed(monkeypatch):
    for name in [
        n
        for n in sys.modules
        if n.split(".")[0] == "jetstream" or n.startswith("rl_speed.serving.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jetstream", None)
    importlib.import_module("rl_speed.serving.policy")  # does without
    for name in ("PolicyEngine", "Server", "ask"):
        with pytest.raises(ImportError, match=r"pip install -e '.\[jetstream\]'.*is another tool"):
            getattr(rl_speed.serving, name)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = rl_speed.serving.Engine


def test_jetstream_is_imported_by_serving_alone(repo):
    users = {
        str(path.relative_to(repo))
        for folder in ("rl_speed", "experiments")
        for path in (repo / folder).rglob("*.py")
        if any(
            line.split()[:1] in (["import"], ["from"])
            and line.split()[1].split(".")[0] in ("jetstream", "grpc")
            for line in path.read_text().splitlines()
        )
    }
    assert users == {f"rl_speed/serving/{name}.py" for name in ("client", "package", "server")}
