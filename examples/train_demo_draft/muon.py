"""Muon for the weight matrices: momentum, made nearly orthogonal by five Newton-Schulz steps."""

import torch


def _orthogonal(x: torch.Tensor) -> torch.Tensor:  # [n, rows, columns]
    tall = x.shape[1] > x.shape[2]
    x = x.bfloat16()
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Updates have about the size of AdamW's, so both can share one learning rate."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.02):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, same in by_shape.items():  # equal shapes together: fewer, larger kernels
                updates = []
                for p in same:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].mul_(group["momentum"]).add_(p.grad)
                    updates.append(p.grad + group["momentum"] * state["momentum"])
                size = 0.2 * max(shape) ** 0.5
                for p, update in zip(same, _orthogonal(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * size)
