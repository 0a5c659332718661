"""Programs for batches of all sizes, and programs for one size each."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx import errors
from tests.support.handmade import Loop, OneLayer
from tests.support.parity import compare, gradients
from tests.support.ranks import one_rank, run_threads


def model() -> OneLayer:
    torch.manual_seed(0)
    return OneLayer(Loop(bias=True))


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length) % 50


def run(module, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
    module.zero_grad()
    loss = module(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(module)}


@pytest.mark.parametrize(("dynamic", "programs"), [(True, 1), (False, 3)])
def test_every_size_is_right_and_has_the_programs_it_needs(dynamic, programs):
    plain = model()
    with one_rank():
        compiled = moefx.compile(
            copy.deepcopy(plain), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)), dynamic=dynamic
        )
        for rows, length in ((2, 6), (2, 7), (3, 7), (2, 6)):
            ids = tokens(rows, length)
            assert not compare(run(compiled, ids), run(plain, ids)).wrong
        assert len(compiled.prepare(input_ids=ids, labels=ids)) == 1
        assert len(compiled._variants) == programs
        symbols = [variant.context.sizes for variant in compiled._variants]
        assert all(bool(each) == dynamic for each in symbols)
        compiled.close()


def test_a_batch_that_fits_a_special_program_takes_the_one_that_fits_all_ranks():
    torch.manual_seed(0)
    plain = OneLayer(Loop(num_experts=4, bias=True))
    copies = [copy.deepcopy(plain) for _ in range(2)]
    with one_rank():
        wanted = run(plain, tokens(2, 1)), run(plain, tokens(2, 7))

    def body(rank: int, world: int) -> tuple[int, dict]:
        compiled = moefx.compile(copies[rank], init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
        for length in (1, 6):  # all ranks alike: a program for sequences of one token, then one for all
            run(compiled, tokens(2, length))
        found = run(compiled, tokens(2, 7 if rank else 1))
        programs = len(compiled._variants)
        compiled.close()
        return programs, found

    for rank, (programs, found) in enumerate(run_threads(2, body)):
        assert programs == 2
        mean = {n: (wanted[0][n] + wanted[1][n]) / 2 for n in wanted[0]}
        assert not compare(found, {**mean, "loss": wanted[rank]["loss"]}).wrong


def test_fixed_sizes_that_differ_between_ranks_are_one_error_on_all():
    def body(rank: int, world: int) -> str:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
        compiled = moefx.compile(models[rank], mesh, dynamic=False)
        with pytest.raises(errors.DivergenceError) as error:
            compiled(input_ids=tokens(2, 5 + rank), labels=tokens(2, 5 + rank))
        compiled.close()
        return str(error.value)

    models = [model(), model()]
    for text in run_threads(2, body):
        assert "dynamic=False" in text
        assert "rank 1 of the mesh: sizes ((2, 6), (2, 6))" in text


def test_other_numbers_of_dims_on_one_rank_are_one_error_on_all():
    def body(rank: int, world: int) -> str:
        ids = tokens(2, 5)[0] if rank else tokens(2, 5)
        compiled = moefx.compile(models[rank], init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
        with pytest.raises(errors.DivergenceError) as error:
            compiled(input_ids=ids, labels=ids)
        compiled.close()
        return str(error.value)

    models = [model(), model()]
    for text in run_threads(2, body):
        assert "rank 0 of the mesh: input_ids=(2, 5), labels=(2, 5)" in text
        assert "rank 1 of the mesh: input_ids=(5,), labels=(5,)" in text


class ReturnsSizes(OneLayer):
    """Sizes before tensors, of which no loss uses the first one."""

    def forward(self, input_ids, labels):
        output = super().forward(input_ids, labels)
        hidden = self.embed(input_ids)
        return {"tokens": input_ids.numel(), "rows": len(labels), "hidden": hidden, "loss": output.loss,
                "logits": output.logits}  # fmt: skip


def test_sizes_among_what_is_returned():
    torch.manual_seed(0)
    plain = ReturnsSizes(Loop(bias=True))
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        compiled = moefx.compile(copy.deepcopy(plain), mesh)
        for rows in (2, 3):
            found = []
            for module in (compiled, plain):
                module.zero_grad()
                out = module(tokens(rows, 6), tokens(rows, 6))
                assert (out["tokens"], out["rows"]) == (6 * rows, rows)
                (out["loss"] + out["logits"].square().mean()).backward()
                found.append(gradients(module))
            assert not compare(*found).wrong
        compiled.close()
