"""Examples, their order, and their rows: nothing lost, nothing twice,
nothing of the prompt learned.
"""

import itertools
import json
import shutil

import numpy as np
import pytest

from rl_speed.data import load_rows
from rl_speed.data.embedded_tokenizer import END_ID, embedded_directory
from rl_speed.data.loaders import DataError
from rl_speed.policy import encode_prompt, load_tokenizer
from rl_speed.sft.data import (
    Example,
    Layout,
    Schedule,
    hold_out,
    keep_short,
    lay_out,
    make_layout,
    pack,
    read_examples,
    spread_rows,
)


def examples(count, seed=0, longest=9):
    rng = np.random.default_rng(seed)
    draw = lambda: rng.integers(0, 50, rng.integers(1, longest)).astype(np.int32)
    return [Example(draw(), draw(), question=f"question {i}") for i in range(count)]


def read_back(batch):
    """The (prompt, response) pairs of a packed batch, from its segments and its mask."""
    found = []
    for tokens, mask, segments in zip(batch.tokens, batch.mask, batch.segments):
        assert not mask[segments == 0].any()
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            # contiguous: positions count from its start.
            assert len(at) and (np.diff(at) == 1).all()
            learn = mask[at]
            assert (np.sort(learn) == learn).all()  # prompt, then response
            found.append((tuple(tokens[at][~learn]), tuple(tokens[at][learn])))
    return found


def pairs(items):
    return sorted((tuple(e.prompt), tuple(e.response)) for e in items)


def naive_best_fit(lengths, capacity):
    """Looks at every row for every item."""
    rows = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        left = [capacity - sum(lengths[i] for i in row) for row in rows]
        fits = [(room, row) for row, room in enumerate(left) if room >= lengths[item]]
        if fits:
            rows[min(fits)[1]].append(item)
        else:
            rows.append([item])
    return rows


def test_packing_is_best_fit_decreasing():
    rng = np.random.default_rng(0)
    for count, capacity in itertools.product((0, 1, 7, 60), (10, 37)):
        lengths = rng.integers(1, 11, count).tolist()
        assert pack(lengths, capacity) == naive_best_fit(lengths, capacity)
    assert pack([4, 6, 5, 5, 1], 10) == [[1, 0], [2, 3], [4]]
    with pytest.raises(ValueError, match="11 tokens does not fit into 10"):
        pack([3, 11], 10)


def test_rows_hold_every_example_once_and_whole():
    items = examples(40)
    batch = lay_out(items, 24, packed=True, count=30)
    assert sorted(read_back(batch)) == pairs(items)
    assert sorted(read_back(spread_rows(batch, 5))) == pairs(items)
    with pytest.raises(ValueError, match="more than 3"):
        lay_out(items, 24, packed=True, count=3)


def test_full_rows_come_in_the_first_pieces():
    layout = Layout(length=24, rows=12, pieces=3, packed=True)
    batch = layout.batch(examples(12))
    held = (batch.segments > 0).any(1)
    # Row r belongs to piece r mod 3, as make_update has it.
    pieces = [held[piece::3].sum() for piece in range(3)]
    assert pieces == sorted(pieces, reverse=True) and pieces[0] == 4 and pieces[2] == 0
    use = layout.use(batch)
    assert use["input_tokens"] == sum(map(len, examples(12)))
    assert use["use"] == use["input_tokens"] / (24 * 8)  # the last piece is not computed


def test_every_epoch_shows_every_example_once_in_a_new_order():
    items = examples(23)
    schedule = Schedule(size=23, batch=5, seed=1, epochs=3)
    assert schedule.steps == 14
    layout = make_layout(
        [len(e) for e in items], lambda: map(schedule.indices, range(14)), 24, True, 2, 1
    )
    drawn = [list(part) for part in map(schedule.indices, range(14))]
    assert [len(part) for part in drawn] == [5] * 13 + [4]
    flat = sum(drawn, [])
    epochs = [flat[i : i + 23] for i in (0, 23, 46)]
    assert (
        all(sorted(epoch) == list(range(23)) for epoch in epochs)
        and epochs[0] != epochs[1] != epochs[2]
    )
    packed = [read_back(layout.batch([items[i] for i in part])) for part in drawn]
    assert sorted(sum(packed, [])) == sorted(pairs(items) * 3)
    # A function of the step alone: a resumed run asks for any of them first.
    assert list(Schedule(23, 5, 1).indices(9)) == drawn[9]
    assert list(Schedule(23, 5, 2).indices(9)) != drawn[9]


def test_one_shape_holds_all_batches_of_a_run():
    items = examples(50)
    lengths = [len(e) for e in items]
    schedule = Schedule(50, 8, 0, epochs=4)
    batches = lambda: map(schedule.indices, range(schedule.steps))
    needed = max(len(pack([lengths[i] for i in part], 32)) for part in batches())
    assert make_layout(lengths, batches, 32, True, 0, 1) == Layout(32, needed, 1, True)
    split = make_layout(lengths, batches, 32, True, 2, 2)
    assert split.rows == -(-needed // 2) * 2 and split.pieces == split.rows // 2
    assert make_layout(lengths, batches, 32, True, 0, 4).rows % 4 == 0
    # Eight examples need no more.
    assert make_layout(lengths, batches, 4096, True, 0, 1).length < 160
    assert make_layout(lengths, batches, 32, False, 0, 1) == Layout(max(lengths), 8, 1, False)
    with pytest.raises(
        ValueError, match="config.examples.micro_rows=3 rows cannot be split over 2 devices"
    ):
        make_layout(lengths, batches, 32, True, 3, 2)


def test_held_out_batches_hold_all_of_them():
    items = examples(41)
    for packed in (True, False):
        parts = Layout(24, 6, 2, packed).batches(items)
        assert {part.tokens.shape for part in parts} == {(3, 24)}
        assert sum(part.mask.sum() for part in parts) == sum(len(e.response) for e in items)
    assert sorted(
        sum((read_back(part) for part in Layout(24, 6, 2, True).batches(items)), [])
    ) == pairs(items)


def test_held_out_questions_do_not_depend_on_order_or_company():
    items = examples(400)
    train, held = hold_out(items, 0.1)
    assert 20 <= len(held) <= 60 and len(train) + len(held) == 400
    names = {e.question for e in held}
    assert {e.question for e in hold_out(items[::-1], 0.1)[1]} == names
    assert {e.question for e in hold_out(items[:200], 0.1)[1]} == names & {
        e.question for e in items[:200]
    }
    twice = hold_out(items + items, 0.1)  # all solutions of a question are on one side
    assert not {e.question for e in twice[0]} & {e.question for e in twice[1]}
    assert hold_out(items, 0.0) == (items, [])
    for share in (1e-9, 0.999):  # few rows: something on both sides
        assert all(hold_out(items[:3], share))


def test_what_is_too_long_is_dropped_and_counted_never_cut():
    items = examples(20)
    kept, dropped = keep_short(items, 8)
    assert dropped == sum(len(e) > 8 for e in items) > 0 and len(kept) + dropped == 20
    with pytest.raises(
        ValueError, match="longer than config.examples.max_length = 1 tokens; the shortest has"
    ):
        keep_short(items, 1)
    with pytest.raises(ValueError, match="does not fit into 5"):
        lay_out([e for e in items if len(e) > 5][:1], 5, packed=False)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(embedded_directory())


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_a_row_without_a_solution_is_named(tokenizer, tmp_path):
    rows = [
        {"id": "a", "question": "+12", "answer": "3", "solution": "3"},
        {"id": "b", "question": "+13", "answer": "4"},
    ]
    path = write(tmp_path / "rows.jsonl", rows[:1] * 2 + rows)
    with pytest.raises(DataError, match=r'rows.jsonl:4: no "solution".* 1 of 4 rows'):
        read_examples(path, tokenizer, "{question}=", (1,))
    assert [len(read_examples(path, tokenizer, "{question}=", (1,), "skip")[0])] == [3]
    assert read_examples(path, tokenizer, "{question}=", (1,), "skip")[1] == 1
    with pytest.raises(DataError, match="none of 1 rows has a solution"):
        read_examples(
            write(tmp_path / "none.jsonl", rows[1:]), tokenizer, "{question}=", (1,), "skip"
        )
    with pytest.raises(ValueError, match="no chat template"):
        read_examples(path, tokenizer, "chat", (1,), "skip")


@pytest.fixture(scope="module")
def qwen(real_data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(real_data / "tokenizer" / "qwen2.5" / name, directory)
    shutil.copy(
        real_data / "tokenizer" / "qwen2.5" / "tokenizer_config.qwen2.5-0.5b-instruct.json",
        directory / "tokenizer_config.json",
    )
    return load_tokenizer(directory)


def test_gsm8k_rows_become_a_chat_prompt_and_exactly_their_solution(qwen, real_data, tmp_path):
    source = (real_data / "gsm8k" / "train.jsonl").read_text().splitlines()[:200]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(source) + "\n")
    rows, _ = load_rows(tmp_path / "gsm8k.jsonl")
    items, skipped = read_examples(tmp_path / "gsm8k.jsonl", qwen, "chat", (qwen.eos_token_id,))
    assert (len(items), skipped) == (200, 0)
    batch = lay_out(items, 1024, packed=True)
    learned = {}
    for tokens, mask, segments in zip(batch.tokens, batch.mask, batch.segments):
        for segment in range(1, segments.max() + 1):
            mine = segments == segment
            learned[qwen.decode(tokens[mine & ~mask])] = qwen.decode(tokens[mine & mask])
    assert learned == {
        qwen.decode(encode_prompt(qwen, row.question, "chat")): json.loads(line)["answer"]
        + "<|im_end|>"
        for row, line in zip(rows, source)
    }


def test_a_solution_ends_with_one_end_token(qwen, tmp_path):
    end, other = qwen.eos_token_id, qwen.convert_tokens_to_ids("<|endoftext|>")
    texts = [
        "So 4.",
        "So 4.<|im_end|>",
        "So 4.<|im_end|>\n",
        "So 4.<|im_end|><|im_end|>",
        "So 4.<|endoftext|>",
    ]
    path = write(
        tmp_path / "rows.jsonl",
        [{"question": "2+2?", "answer": "4", "solution": text} for text in texts],
    )
    found, _ = read_examples(path, qwen, "plain", (end, other))
    bare = qwen.encode("So 4.")
    assert [e.response.tolist() for e in found] == [[*bare, end]] * 4 + [[*bare, other]]


def test_distilled_rows_need_no_answer_and_errors_name_the_line(tmp_path):
    tokenizer = load_tokenizer(embedded_directory())
    path = tmp_path / "distilled.jsonl"
    path.write_text(
        '{"question": "+34=", "solution": "7"}\n'
        '{"question": "+35=", "solution": "8", "answer": ""}\n'
    )
    examples, skipped = read_examples(path, tokenizer, "plain", (END_ID,))
    assert [e.answer for e in examples] == ["7", ""] and skipped == 0
    path.write_text('{"question": "+34=", "solution": "7"}\n{"question": "+35=", "answer": "8"}\n')
    with pytest.raises(DataError, match=r'distilled.jsonl:2: no "solution"'):
        read_examples(path, tokenizer, "plain", (END_ID,))
