"""How many of 128 devices should read prompts, and how many should write answers? Simulates three splits.

uv run examples/plan_cluster.py                     the default traffic: agents and chat
uv run examples/plan_cluster.py --load 1.5          half as many requests again
uv run deepinfer plan --cluster FILE                everything else: docs/cluster.md
"""

from __future__ import annotations

import argparse

from deepinfer_core.cluster.build import Cluster
from deepinfer_core.cluster.model_work import RELEASE
from deepinfer_core.cluster.outcome import simulate
from deepinfer_core.cluster.plan_file import ClusterPlan, ClusterSettings, DecodeSettings, PrefillSettings

DEVICES = 128


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput, waits and speeds of three splits of a cluster.")
    parser.add_argument("--load", type=float, default=1.0, help="scales the traffic (1)")
    parser.add_argument("--seconds", type=float, default=30.0, help="to simulate (30)")
    args = parser.parse_args()

    columns = "{:>8} {:>7}  {:>15}  {:>17}  {:>15}  {}"
    print(columns.format("prefill", "decode", "output tokens/s", "first token, 99 %", "tokens/s a user", "limit"))
    for prefill_devices in (32, 64, 96):
        plan = ClusterPlan(
            cluster=ClusterSettings(load=args.load, seconds=args.seconds, warmup_seconds=15.0, scale_down=8),
            prefill=PrefillSettings(devices=prefill_devices),
            decode=DecodeSettings(devices=DEVICES - prefill_devices, expert_parallel=32),
        )
        run = simulate(Cluster(plan, RELEASE, "position"))
        print(
            columns.format(
                prefill_devices,
                DEVICES - prefill_devices,
                f"{run.output_tokens_per_s:,.0f}",
                f"{run.first_token_s.p99:.2f} s",
                f"{run.user_tokens_per_s.p50:.0f}",
                run.capacity.bottleneck + ("" if run.keeps_up else ", which does not keep up"),
            )
        )


if __name__ == "__main__":
    main()
