"""A results file that grows: what is in it already is not measured again, and what comes from other sources is.

Beside the fields of `records`, a document may hold "stale": records of other sources or versions than "provenance" names, kept until
they are measured again. "records" are always of the provenance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..errors import require
from .case import Case
from .records import SCHEMA

_SOURCES = ("source_hash", "snack", "torch", "cuda")  # a record is stale when one of these is another


class Results:
    """Records of one suite on one machine, by the words of their case."""

    def __init__(self, suite: str, provenance: dict, before: dict | None = None, path: object = "the file"):
        """`before`: the document that the file holds already. SnackError when it is of another suite or device."""
        self.suite, self.provenance = suite, provenance
        self.records: dict[str, dict] = {}
        self.stale: dict[str, dict] = {}
        if before is None:
            return
        old = before.get("provenance", {})
        for key, word, ours in (("suite", before.get("suite"), suite), ("device", old.get("device"), provenance.get("device"))):
            require(word == ours, f"{path} holds results of the {key} {word}, not {ours}: give another file with --json, or remove this one.")
        if "energy" in old:  # how the records that have it were measured; this run may measure none
            provenance.setdefault("energy", old["energy"])
        same = all(old.get(key) == provenance.get(key) for key in _SOURCES)
        for place, found in ((self.records if same else self.stale, before["records"]), (self.stale, before.get("stale", []))):
            for record in found:
                if "case" in record:  # records of the first suites had none, and nothing would ever take their place
                    place.setdefault(record["case"], record)

    def missing(self, cases: Iterable[Case], has_energy: bool = True) -> list[Case]:
        """The cases that are not in the file; one that is there without a peer that is asked for comes back with all peers."""
        missing = []
        for case in cases:
            record = self.records.get(str(case))
            if record is None:
                missing.append(case)
                continue
            has = {"snack": record, **record["peers"]}
            lacks_peer = any(peer not in has for peer in case.peers)
            lacks_energy = has_energy and any(name in has and _could(has[name]) for name in case.energy)
            if lacks_peer or lacks_energy:
                watched = [name for name, side in has.items() if "energy_mj" in side and name not in case.energy]
                peers = [name for name in record["peers"] if name not in case.peers]
                missing.append(replace(case, peers=(*case.peers, *peers), energy=(*case.energy, *watched)))
        return missing

    def add(self, record: dict) -> None:
        """A record that was measured now, in place of an older one."""
        self.stale.pop(record["case"], None)
        self.records[record["case"]] = record

    def document(self) -> dict:
        """What belongs into the file."""
        document = {"schema": SCHEMA, "suite": self.suite, "provenance": self.provenance, "records": list(self.records.values())}
        return {**document, "stale": list(self.stale.values())} if self.stale else document


def _could(side: dict) -> bool:
    """Whether it ran, and its energy is not there."""
    return "time_us" in side and "energy_mj" not in side
