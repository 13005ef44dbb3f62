"""Group sequence policy optimization: the clip looks at the ratio of the whole row, length-normalised.

    s = exp(mean over the row of log(policy / proximal)),  s_t = sg(s) policy_t / sg(policy_t)
    loss_t = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

All tokens of a row are clipped or none. With the reduction `sequence_mean` and one advantage for the row the gradient
is that of max(-A s, -A clip(s)) for the row; the form per token also takes advantages per token.

Source: Group Sequence Policy Optimization (arXiv:2507.18071), section 4.1, equations 5 to 7; per token: section 4.3.

Shapes: N tokens.
"""

from __future__ import annotations

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.inputs import LossInputs, PolicyLoss
from relax.algorithms.ppo_clip import clipped_surrogate
from relax.algorithms.ratios import ratio, row_mean


def gspo(inputs: LossInputs, config: AlgorithmConfig) -> PolicyLoss:
    """Return the clipped surrogate of each token under its row's ratio."""
    mean_N = row_mean(inputs.log_ratio_N.detach(), inputs.row_N, inputs.mask_N)
    # The second factor is 1 and carries the token's gradient.
    ratio_N = ratio(mean_N) * (inputs.logprobs_N - inputs.logprobs_N.detach()).exp()
    return clipped_surrogate(ratio_N, inputs.advantages_N, config)
