"""The content of ``summary.json``, for people and programs that do not read every round."""

from __future__ import annotations

from typing import Any

from fedc2i.engine.records import POINTS, Point
from fedc2i.runs.fingerprint import versions
from fedc2i.runs.results import Result


def summary(result: Result) -> dict[str, Any]:
    """Scores at both points, cost, rejected uploads, versions and data checksums; that of a read run as written."""
    if result.written:
        return dict(result.written)
    config, federation, rounds, spent = result.config, result.federation, result.rounds, result.privacy
    return {
        "method": config.method,
        "title": result.label,
        "key": result.key,
        "data": config.data,
        "clients": list(federation.names),
        "classes": list(federation.classes),
        "samples": federation.samples(),
        "averages": {title: list(members) for title, members in federation.averages.items()},
        "seeds": list(config.seeds),
        "rounds": max(report.round for report in rounds),
        "headline": result.method.headline,
        "points": {point: _scores(result, point) for point in POINTS},
        "seconds": round(result.seconds, 3),
        "seconds_per_round": round(result.seconds / len(rounds), 4),
        "bytes_up_per_client_round": result.bytes_up,
        "bytes_down_per_client_round": result.bytes_down,
        "refused": [
            {
                "seed": report.seed,
                "round": report.round,
                "clients": list(report.refused),
                "of": len(report.participants),
                "why": dict(report.why),
            }
            for report in rounds
            if report.refused
        ],
        **_attack(result),
        "privacy": None if spent is None else spent.to_json(),
        **_asked_again(result),
        "refused_uploads": result.refused,
        "notes": list(federation.notes),
        "data_checksums": federation.checksums,
        "versions": versions(config.engine),
        "device": str(config.torch_device()),
    }


def _scores(result: Result, point: Point) -> dict[str, Any]:
    """By metric, then by client and average."""
    metrics = sorted({name for own in result.last(result.config.seeds[0]).metrics[point] for name in own})
    return {
        metric: {name: {"mean": score.mean, "sd": score.sd} for name, score in result.scores(point, metric).items()}
        for metric in metrics
    }


def _attack(result: Result) -> dict[str, Any]:
    """Empty without an attack."""
    attackers = {str(seed): own for seed, own in result.attackers.items()}
    return {"attack": result.config.attack, "attackers": attackers} if attackers else {}


def _asked_again(result: Result) -> dict[str, Any]:
    """Rounds whose uploads were requested more than once; empty if there are none."""
    more = [
        {"seed": seed, "round": number, "times": times}
        for seed, own in result.asked.items()
        for number, times in sorted(own.items())
        if times > 1
    ]
    return {"asked_again": more} if more else {}
