"""The models that the small experiments compare, by name: what each sets in configs/fashion_12px.yaml."""

from experiments.runs import FASHION, Run

NO_BIAS, PLAIN, SOFTMAX = 'model_kwargs.rel_pos=none', 'model_kwargs.normalize=false', 'model_kwargs.kernel=softmax'
ABSOLUTE, PER_LAYER, FAST_BIAS = 'model_kwargs.pos_embed=learn', 'model_kwargs.rel_pos=layer', 'rel_pos_lr_scale=30'
LONG = 'epochs=18'  # of 100 steps, three times the file's

# the models with a bias have no absolute positions and those without have learned ones, unless said
VARIANTS = {
    'softmax': (SOFTMAX, PLAIN, NO_BIAS),
    'prf': (PLAIN, NO_BIAS),
    'nprf': (NO_BIAS,),
    'nprf_bias': (),
    'nprf_bias_abs': (ABSOLUTE,),
    'nprf_bias_fast': (FAST_BIAS,),
    'nprf_bias_fast_abs': (FAST_BIAS, ABSOLUTE),
    **{f'nprf_bias_x{scale}': (f'rel_pos_lr_scale={scale}',) for scale in (3, 10, 100)},
    'nprf_start': (),  # from a bias that falls with the distance, see experiments/bias_ablation.py
    'nprf_start_fast': (FAST_BIAS,),
    'nprf_layer': (PER_LAYER,),
    'nprf_layer_fast': (PER_LAYER, FAST_BIAS),
    'nprf_layer_abs': (PER_LAYER, ABSOLUTE),
    'nprf_no_positions': (NO_BIAS, 'model_kwargs.pos_embed=none'),
    'prf_bias_fast': (PLAIN, FAST_BIAS),
    'softmax_bias': (SOFTMAX, PLAIN),
    'softmax_bias_fast': (SOFTMAX, PLAIN, FAST_BIAS),
    'nsoftmax': (SOFTMAX, NO_BIAS),
    'nsoftmax_bias': (SOFTMAX,),
    'nsoftmax_bias_fast': (SOFTMAX, FAST_BIAS),
}

# what the models of the paper's image table are called in pictures
LABELS = {'softmax': 'softmax', 'prf': 'PRF', 'nprf': 'NPRF without bias', 'nprf_bias': 'NPRF with bias'}


def runs(variant: str, seeds: int, *more: str, suffix: str = '', config: str = FASHION) -> list[Run]:
    """Runs of a variant that differ in initialization, order of the images and random features."""
    changes = (*VARIANTS[variant], *more)
    return [Run(variant + suffix, s, (*changes, f'model_kwargs.seed={s}'), config) for s in range(seeds)]


def long_runs(variant: str, seeds: int) -> list[Run]:
    return runs(variant, seeds, LONG, suffix='_long')
