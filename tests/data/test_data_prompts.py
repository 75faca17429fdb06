"""The prompt stream: serial visits, epochs, hand-back, resume."""

import json

import numpy as np
import pytest

from rl_speed.data.orders import in_file_order
from rl_speed.data.prompts import Prompt, PromptStream


def make(i):
    return Prompt(
        id=f"p{i}",
        tokens=np.array([i], np.int32),
        answer=str(i),
        answer_tokens=np.array([i], np.int32),
        text=str(i),
    )


DATA = [make(i) for i in range(7)]


def key(prompts):
    return [(p.id, p.visit) for p in prompts]


def test_every_epoch_is_a_new_permutation_and_every_departure_a_new_visit():
    stream = PromptStream(DATA, seed=1)
    epochs = [stream.take(7) for _ in range(3)]
    assert [p.visit for epoch in epochs for p in epoch] == list(range(21))
    orders = [[p.id for p in epoch] for epoch in epochs]
    assert all(sorted(order) == [p.id for p in DATA] for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_draws_do_not_depend_on_how_many_are_taken_at_once():
    one = PromptStream(DATA, seed=3)
    many = PromptStream(DATA, seed=3)
    assert key([one.take(1)[0] for _ in range(20)]) == key(many.take(3) + many.take(17))
    assert key(PromptStream(DATA, seed=4).take(20)) != key(PromptStream(DATA, seed=3).take(20))


def test_unshuffled_keeps_the_order_of_the_data():
    assert [p.id for p in PromptStream(DATA, order=in_file_order(len(DATA))).take(9)] == [
        f"p{i % 7}" for i in range(9)
    ]


def test_put_back_goes_first_with_its_old_visit():
    stream = PromptStream(DATA, seed=1)
    taken = stream.take(6)
    stream.put_back(taken[4:])
    stream.put_back([taken[1]])
    again = stream.take(5)
    assert key(again[:3]) == key([taken[1], taken[4], taken[5]])
    assert [p.visit for p in again[3:]] == [6, 7]


def test_a_prompt_handed_back_over_an_epoch_boundary_is_still_itself():
    stream = PromptStream(DATA, seed=1)
    early = stream.take(1)[0]
    stream.take(20)  # two epochs on
    stream.put_back([early])
    assert key(stream.take(1)) == key([early])


def test_put_back_refuses_strangers_and_doubles():
    stream = PromptStream(DATA)
    taken = stream.take(2)
    with pytest.raises(ValueError, match="did not come from this stream"):
        stream.put_back([make(0)])
    stream.put_back(taken)
    with pytest.raises(ValueError, match="twice"):
        stream.put_back(taken[:1])


@pytest.mark.parametrize("source", [DATA, make], ids=["finite", "endless"])
def test_resume_gives_the_same_next_ten_draws(source):
    stream = PromptStream(source, seed=5)
    stream.put_back(stream.take(11)[8:10])
    state = json.loads(json.dumps(stream.state_dict()))  # survives any checkpointer
    expected = key(stream.take(10))
    restored = PromptStream(source, seed=5)
    restored.load_state_dict(state)
    assert key(restored.take(10)) == expected


def test_resume_with_other_data_or_seed_is_refused():
    state = PromptStream(DATA, seed=5).state_dict()
    for other in (
        PromptStream(DATA[:5], seed=5),
        PromptStream(DATA, seed=6),
        PromptStream(make, seed=5),
        PromptStream(DATA, seed=5, order=in_file_order(len(DATA))),
        PromptStream(DATA[::-1], seed=5),
        PromptStream([*DATA[:-1], make(99)], seed=5),
    ):
        with pytest.raises(ValueError, match="saved prompt stream"):
            other.load_state_dict(state)
    PromptStream(DATA, seed=5).load_state_dict(state)


def test_metrics_count_epochs_and_returned():
    stream = PromptStream(DATA)
    stream.put_back(stream.take(14)[:2])
    assert stream.metrics() == {
        "prompts/visits": 14.0,
        "prompts/returned": 2.0,
        "prompts/epoch": 2.0,
    }
    assert stream.metrics()["prompts/epoch"] // 1 == 2


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="empty"):
        PromptStream([])
