"""A GPU's runner whose device takes no time: what it does on the host is what serves.

Plans are applied, described, cut, staged and copied, and results are picked up, as on a GPU; but
nothing is computed: each sequence reads a text aloud, token by token, from a place that depends on
its position only. Greedy requests only, as sampling would launch kernels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.arch import ModelArch, RopeConfig
from octavo.attention.gather import GatherAttention
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.plan import StepPlan
from octavo.runner.gpu.graphs import graph_sizes, mixed_sizes
from octavo.runner.gpu.layout import Room
from octavo.runner.gpu.pending import PendingStep
from octavo.runner.gpu.runner import GpuRunner
from octavo.runner.gpu.steps import HostStep
from octavo.runner.kv_store import KVStore

_H200_SMS = 132
ARCH = ModelArch(
    architecture="LlamaForCausalLM",
    vocab_size=16,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    rope=RopeConfig(rotary_dim=128),
    tie_word_embeddings=True,
)
"""Attention in the shape of an 8B model, as this is what steps are cut by; the rest is small."""


class HostRunner(GpuRunner):
    """Answers every plan with the text's next tokens.

    text_ids: token ids of the text; graphs: whether steps are filled up to recorded sizes.
    """

    def __init__(
        self,
        text_ids: list[int],
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        graphs: bool = True,
    ) -> None:
        device = torch.device("cpu")
        model = Decoder(ARCH, GatherAttention(), torch.float32, max_model_len, device)
        store = KVStore(
            1, 1, ARCH.num_kv_heads, block_size, ARCH.head_dim, torch.float32, device
        )  # nothing is written to it
        workspace = Workspace(ARCH, max_num_tokens, max_num_seqs, torch.float32, device)
        super().__init__(
            model,
            store,
            workspace,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_blocks_per_seq=-(-max_model_len // block_size),
            num_sms=_H200_SMS,
        )
        self._text = np.array(text_ids, dtype=np.int32)
        sizes = (graph_sizes(max_num_seqs), mixed_sizes(max_num_tokens)) if graphs else ((), ())
        self.graphs._sizes = {False: sizes[0], True: sizes[1]}

    def _compute(
        self, plan: StepPlan, step: HostStep, pending: PendingStep
    ) -> tuple[Tensor, Tensor]:
        room: Room | None = self._room_for(step)
        placed = self.inputs.upload(step, room)
        num_rows = len(step.seq_ids)
        places = step.sample_positions % len(self._text)
        self._answer.numpy()[:num_rows] = self._text[places]
        return self.workspace.logits[:num_rows], placed.sample_rows[:num_rows]
