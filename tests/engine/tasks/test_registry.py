from nprf_vit.config.task_keys import TASK_KEYS, eval_metrics
from nprf_vit.engine.tasks.registry import TASKS


def test_a_task_has_one_name_in_both_tables():
    assert list(TASKS) == list(TASK_KEYS)


def test_every_metric_is_of_the_model_and_of_its_average():
    assert eval_metrics() == ('top1', 'ema_top1', 'loss', 'ema_loss', 'bpd', 'ema_bpd')
