"""Several processes are one process with the same devices."""

from several import Left, assert_same


def test_two(run, tmp_path):
    for n in (2, 1):
        done = run(tmp_path / str(n), processes=n)
        assert [d.returncode for d in done] == [0] * n, [d.stderr[-3000:] for d in done]
    two, one = Left(tmp_path / "2"), Left(tmp_path / "1")
    assert_same(two, one, exactly=False)
