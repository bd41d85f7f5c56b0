"""What fits on which devices? Plans a checkpoint from its config.json and headers, before anything is loaded.

uv run examples/plan_memory.py                                        the model that `LLM()` would take
uv run examples/plan_memory.py --model FOLDER --memory 141 --context 131072 --sequences 256
"""

from __future__ import annotations

import argparse

from deepinfer_core.checkpoint.memory_plan import Workload, plan_memory
from deepinfer_core.checkpoint.resolve import resolve_model
from deepinfer_core.config.model import ModelConfig

GB = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description="Largest context and batch on 1 to 64 devices.")
    parser.add_argument("--model", help="checkpoint folder; config.json alone is enough")
    parser.add_argument("--memory", type=float, default=141.0, metavar="GB", help="memory of one device (141)")
    parser.add_argument("--context", type=int, help="tokens of each sequence (the model's limit)")
    parser.add_argument("--sequences", type=int, default=1, help="sequences at once, over all devices (1)")
    args = parser.parse_args()

    folder = resolve_model(args.model, weights=False)
    config = ModelConfig.from_folder(folder)
    context = config.max_position_embeddings if args.context is None else args.context
    print(f"{folder}: {args.sequences} x {context:,} tokens on devices of {args.memory:g} GB")
    print(f"{'devices':>7}  {'GB each':>8}  fits  {'largest context':>15}  {'most sequences':>14}")
    for num_devices in (1, 2, 4, 8, 16, 32, 64):
        workload = Workload(
            context_tokens=context,
            num_sequences=args.sequences,
            num_devices=num_devices,
            device_bytes=int(args.memory * GB),
            form="bfloat16",  # as an accelerator holds the weights
        )
        plan = plan_memory(config, workload)
        limits = plan.limits
        if limits is not None:  # None only without device_bytes
            print(
                f"{num_devices:>7}  {plan.ranks[0].total / GB:>8.2f}  {'yes' if plan.fits else 'no':>4}"
                f"  {limits.context_tokens:>15,}  {limits.num_sequences:>14,}"
            )


if __name__ == "__main__":
    main()
