"""SIGTERM and Ctrl-C are heard between two pieces of work, and the handlers are given back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tessera.engine.signals import Interrupted, Signals
from tests.engine.toy import toy_engine


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in Signals.WATCHED]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_noted_and_nothing_is_torn(number, code):
    with Signals() as signals:
        assert signals.received == 0
        send(number)
        assert signals.received == number
    assert Interrupted(number).exit_code == code
    assert number.name in str(Interrupted(number))


def test_the_first_signal_decides():
    with Signals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert signals.received == signal.SIGTERM


def test_a_second_ctrl_c_means_now():
    with Signals() as signals:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signals.received == signal.SIGINT


def test_the_handlers_are_given_back_also_after_an_accident():
    before = handlers()
    with pytest.raises(ValueError), Signals():
        assert handlers() != before
        raise ValueError
    assert handlers() == before


def test_a_second_use_has_forgotten_the_first():
    signals = Signals()
    with signals:
        send(signal.SIGTERM)
    with signals:
        assert signals.received == 0


def test_beside_the_main_thread_it_does_nothing_and_does_no_harm():
    before, failures = handlers(), []

    def enter() -> None:
        try:
            with Signals() as signals:
                assert signals.received == 0
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not failures and handlers() == before


def in_training(engine) -> None:
    step = engine.step
    engine.step = lambda number, micros: (
        send(signal.SIGTERM) if number == 3 else None,
        step(number, micros),
    )[1]


def in_validation(engine) -> None:
    eval_step = engine.task.eval_step
    engine.task.eval_step = lambda batch: (
        send(signal.SIGTERM) if engine.done == 4 else None,
        eval_step(batch),
    )[1]


def in_sampling(engine) -> None:
    sample = engine.task.sample
    engine.task.sample = lambda batch: (
        send(signal.SIGTERM) if engine.done == 4 else None,
        sample(batch),
    )[1]


@pytest.mark.parametrize("when", [in_training, in_validation, in_sampling])
def test_a_run_that_is_asked_to_stop_saves_its_step_and_goes_on_from_there(when, tmp_path):
    cadence = {
        "steps": 8,
        "checkpoint_every": 8,
        "validate_every": 2,
        "sample_every": 2,
        "log_every": 1,
    }
    engine = toy_engine(tmp_path, **cadence)
    when(engine)
    before = handlers()
    with pytest.raises(Interrupted) as stopped:
        engine.run()
    assert stopped.value.exit_code == 143 and engine.done == 4
    assert handlers() == before
    again = toy_engine(tmp_path, **cadence)
    assert again.done == 4
    again.run()
    records = again.folder.records()
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6, 7, 8], (
        "no gap and no double"
    )
    assert [r["step"] for r in records if r["kind"] == "validation"] == [2, 4, 6, 8]
    assert sorted(path.name for path in again.folder.samples.iterdir()) == [
        "000002",
        "000004",
        "000006",
        "000008",
    ]
