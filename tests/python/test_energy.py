"""EnergyMeter on a card and a clock made up here: arithmetic, turns, idle power, and machines that cannot."""

import pytest

import snack
from snack import SnackError
from snack.bench import EnergyMeter, measure
from snack.bench.case import Case
from test_bench import QuickMeter


class Card:
    """NVML, clock and work at once: time passes only while work is done or slept; power is 80 W, and more while a work plays."""

    def __init__(self, counter=True):
        self.now, self.millijoules, self.order, self.counter = 0.0, 1e6, [], counter

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid != "GPU-1":
            raise RuntimeError("Not Found")
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        assert handle == "handle"
        if not self.counter:
            raise RuntimeError("Not Supported")
        return int(self.millijoules)

    def pass_time(self, seconds, watts=80.0):
        self.now += seconds
        self.millijoules += 1e3 * watts * seconds

    def work(self, name, seconds, watts):
        def play():
            if not self.order or self.order[-1] != name:
                self.order.append(name)
            self.pass_time(seconds, watts)

        return play

    def meter(self, **options):
        return EnergyMeter(nvml=self, uuid="GPU-1", clock=lambda: self.now, sleep=self.pass_time, wait=lambda: None, **options)


def test_energy_a_call_power_and_co2():
    card = Card()
    found = card.meter(seconds=5, rounds=2, grams_per_kwh=360).compare({
        "ours": (card.work("ours", 0.002, 300.0), 10), "dense": card.work("dense", 0.004, 500.0),
    })
    # 300 W for 2 ms is 600 mJ a play of ten calls; without the idle 80 W it is 440.
    assert found["ours"]["energy_mj"] == pytest.approx(60, rel=1e-3) and found["ours"]["energy_net_mj"] == pytest.approx(44, rel=1e-3)
    assert found["ours"]["power_w"] == 300 and found["ours"]["idle_w"] == 80
    assert found["ours"]["co2_ug"] == pytest.approx(6.0, rel=1e-3)  # 60 mJ / 3.6e9 mJ * 360 g
    assert found["dense"]["energy_mj"] == pytest.approx(2000, rel=1e-3) and found["dense"]["power_w"] == 500
    assert found["dense"]["energy_spread"] < 1e-3


def test_contenders_take_turns_in_windows_of_seconds_after_the_idle_card():
    card = Card()
    works = {name: card.work(name, 0.01, 200.0) for name in "abc"}
    card.meter(seconds=5, rounds=3).compare(works)
    assert "".join(card.order) == "abc" + "abc" * 3  # the first are untimed
    assert card.now >= 3 * 3 * 5


def test_a_warmer_card_shows_in_the_spread():
    card = Card()
    watts = [100.0]

    def play():
        card.pass_time(0.01, watts[0])
        watts[0] += 0.01

    assert card.meter(rounds=2).compare({"a": play})["a"]["energy_spread"] > 0.02


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EnergyMeter(nvml=Card(), uuid="GPU-2", wait=lambda: None), "does not open the card GPU-2"),
        (lambda: Card(counter=False).meter(), "has no counter of its energy"),
        (lambda: Card().meter(seconds=0.1), "shorter than the counter can tell"),
        (lambda: Card().meter(rounds=0), "must be positive"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(make, words):
    with pytest.raises(SnackError, match=words) as error:
        make()
    assert str(error.value).count("\n") == 0


def test_a_counter_that_stands_still_is_a_sentence():
    card = Card()

    def play():
        card.now += 0.01

    with pytest.raises(SnackError, match="did not move"):
        card.meter().compare({"a": play})


def test_without_a_card_the_public_name_says_so():
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(SnackError, match="no NVIDIA card"):
            snack.bench.EnergyMeter()


def test_records_have_the_energy_of_those_who_are_watched():
    class Fixed:
        def compare(self, works):
            for play, calls in works.values():
                assert calls >= 1
                play()
            return {name: {"energy_mj": 1.0} for name in works}

    case = Case("spmm", (8, 8), 0.5, 1, peers=("dense", "dense_mask", "sputnik"), energy=("snack", "dense", "sputnik"))
    record = measure.Bench(QuickMeter(2), {}, Fixed()).measure(case)
    assert record["energy_mj"] == record["peers"]["dense"]["energy_mj"] == 1.0
    assert not any("energy_mj" in record["peers"][name] for name in ("dense_mask", "sputnik"))


def test_a_counter_that_fails_on_the_way_leaves_the_other_numbers():
    card = Card()
    bench = measure.Bench(QuickMeter(2), {}, card.meter())
    card.counter = False
    record = bench.measure(Case("spmm", (8, 8), 0.5, 1, energy=("snack",)))
    assert record["time_us"] > 0 and "energy_mj" not in record and bench.energy is None and "no counter" in bench.energy_problem
