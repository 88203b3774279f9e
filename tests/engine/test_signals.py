"""SIGTERM and SIGINT stop a run between two pieces of work, and the handlers are restored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tessera.engine.engine import Engine
from tessera.engine.signals import Interrupted, Signals
from tests.engine.small_task import small_engine


def current_handlers() -> list[object]:
    return [signal.getsignal(number) for number in Signals.WATCHED]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_recorded_and_raises_nothing(number, code):
    with Signals() as signals:
        assert signals.received == 0
        send(number)
        assert signals.received == number
    assert Interrupted(number).exit_code == code
    assert number.name in str(Interrupted(number))


def test_the_first_signal_determines_the_exit_code():
    with Signals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert signals.received == signal.SIGTERM


def test_a_second_sigint_raises_keyboard_interrupt(monkeypatch):
    """Unless it follows at once: a launcher passes on the Ctrl-C that its processes receive too."""
    with Signals() as signals:
        send(signal.SIGINT)
        send(signal.SIGINT)
        monkeypatch.setattr("tessera.engine.signals.SAME_SECONDS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signals.received == signal.SIGINT


def test_the_handlers_are_restored_after_an_exception():
    before = current_handlers()
    with pytest.raises(ValueError), Signals():
        assert current_handlers() != before
        raise ValueError
    assert current_handlers() == before


def test_a_second_use_starts_without_a_received_signal():
    signals = Signals()
    with signals:
        send(signal.SIGTERM)
    with signals:
        assert signals.received == 0


def test_outside_the_main_thread_no_handler_is_changed():
    before, failures = current_handlers(), []

    def enter() -> None:
        try:
            with Signals() as signals:
                assert signals.received == 0
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not failures and current_handlers() == before


def signal_at(function: Callable[..., Any], is_time: Callable[..., bool]) -> Callable[..., Any]:
    """Send SIGTERM before calls of a function for which `is_time` is true."""

    def wrapper(*args: Any) -> Any:
        if is_time(*args):
            send(signal.SIGTERM)
        return function(*args)

    return wrapper


def interrupt_training(engine: Engine) -> None:
    engine.run_step = signal_at(engine.run_step, lambda step, micro_batches: step == 3)


def interrupt_validation(engine: Engine) -> None:
    task = engine.task
    task.eval_step = signal_at(task.eval_step, lambda batch: engine.global_step == 4)


def interrupt_sampling(engine: Engine) -> None:
    task = engine.task
    task.sample = signal_at(task.sample, lambda batch: engine.global_step == 4)


@pytest.mark.parametrize(
    "interrupt", [interrupt_training, interrupt_validation, interrupt_sampling]
)
def test_an_interrupted_run_saves_its_step_and_resumes_there(interrupt, tmp_path):
    settings = {
        "steps": 8,
        "checkpoint_every": 8,
        "validate_every": 2,
        "sample_every": 2,
        "log_every": 1,
    }
    engine = small_engine(tmp_path, **settings)
    interrupt(engine)
    before = current_handlers()
    with pytest.raises(Interrupted) as raised:
        engine.run()
    assert raised.value.exit_code == 143 and engine.global_step == 4
    assert current_handlers() == before
    resumed = small_engine(tmp_path, **settings)
    assert resumed.global_step == 4
    resumed.run()
    records = resumed.directory.read_records()
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6, 7, 8], (
        "no step is missing or logged twice"
    )
    assert [r["step"] for r in records if r["kind"] == "validation"] == [2, 4, 6, 8]
    assert sorted(path.name for path in resumed.directory.samples.iterdir()) == [
        "000002",
        "000004",
        "000006",
        "000008",
    ]
