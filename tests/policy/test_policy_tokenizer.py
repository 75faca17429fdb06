"""The tokenizer: Qwen's own files against reference encodings, prompts, end tokens."""

import json
import shutil

import pytest

from rl_speed.data.embedded_tokenizer import END_ID, save_tokenizer
from rl_speed.policy import encode_prompt, end_token_ids, load_tokenizer


@pytest.fixture(scope="module")
def qwen(real_data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(real_data / "tokenizer" / "qwen2.5" / name, directory)
    shutil.copy(real_data / "tokenizer" / "qwen2.5" / "tokenizer_config.qwen2.5-0.5b-instruct.json",
                directory / "tokenizer_config.json")
    return directory


def test_real_tokenizer_encodes_every_reference_text(real_data, qwen):
    tokenizer, checked = load_tokenizer(qwen), 0
    for line in (real_data / "tokenizer" / "reference_encodings.jsonl").read_text().splitlines():
        row = json.loads(line)
        if any(tag in row["text"] for tag in ("<think>", "</think>", "<tool_response>")) or "qwen3" not in row:
            continue
        assert tokenizer.encode(row["text"]) == row["qwen3"], row["text"]
        checked += 1
    assert checked > 100


def test_chat_prompt_has_each_special_token_once(qwen):
    tokenizer = load_tokenizer(qwen)
    ids = encode_prompt(tokenizer, "What is 1+1?", "chat")
    text = tokenizer.decode(ids)
    assert text.count("<|im_start|>user") == 1 and text.endswith("<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 3 and text.count("<|im_end|>") == 2  # system, user, and the open assistant turn
    assert encode_prompt(tokenizer, "x", "Q: {question}") == tokenizer.encode("Q: x")
    with pytest.raises(ValueError, match="no {question}"):
        encode_prompt(tokenizer, "x", "Q:")


def test_end_tokens_come_from_generation_config_and_tokenizer(qwen, tmp_path):
    tokenizer = load_tokenizer(qwen)
    shutil.copytree(qwen, tmp_path / "t")
    assert end_token_ids(tmp_path / "t", tokenizer) == (151645,)
    for value, want in ((151643, (151643, 151645)), ([151645, 151643], (151645, 151643))):
        (tmp_path / "t" / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert end_token_ids(tmp_path / "t", tokenizer) == want


def test_missing_tokenizer_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        load_tokenizer(tmp_path / "absent")


def test_templates_without_a_chat_template(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert encode_prompt(tokenizer, "+34", "plain") == tokenizer.encode("+34")
    assert tokenizer.decode(encode_prompt(tokenizer, "+34", "{question}=")) == "+34="
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(tokenizer, "+34", "chat")
    # A question may hold braces; only the template is a format.
    assert encode_prompt(tokenizer, "{0}", "{question}=") == tokenizer.encode("{0}=")


def test_end_tokens_without_generation_config(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert end_token_ids(tmp_path, tokenizer) == (END_ID,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID, 5, END_ID]}))
    assert end_token_ids(tmp_path, tokenizer) == (END_ID, 5)  # each once
    tokenizer.eos_token = None
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1.0}))
    with pytest.raises(ValueError, match="neither generation_config.json nor the tokenizer names an end token"):
        end_token_ids(tmp_path, tokenizer)
