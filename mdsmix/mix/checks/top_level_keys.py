"""Checks the top level of a training YAML, which LLM-Foundry refuses if it has an unknown key."""

from __future__ import annotations

from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.messages import find_nearest
from mdsmix.mix.streams.mix import Mix

CHECKS = CheckList()
TOP_LEVEL_KEYS = frozenset(
    {
        *("accumulate_train_batch_on_tokens", "algorithms", "autoresume", "callbacks"),
        *("code_paths", "compile_config", "console_log_interval", "cuda_load_lazy"),
        "device_eval_batch_size",
        *("device_train_batch_size", "device_train_grad_accum", "device_train_microbatch_size"),
        *("dist_timeout", "eval_first", "eval_gauntlet", "eval_gauntlet_str", "eval_interval"),
        *("eval_loader", "eval_loaders", "eval_subset_num_batches", "expandable_segments"),
        *("flatten_metadata", "fsdp_config", "global_train_batch_size", "icl_seq_len"),
        *("icl_subset_num_batches", "icl_tasks", "icl_tasks_str", "load_ignore_keys", "load_path"),
        *("load_strict_model_weights", "load_weights_only", "log_config", "log_to_console"),
        *("loggers", "max_duration", "max_seq_len", "max_split_size_mb", "metadata", "model"),
        *("n_gpus", "only_composer_checkpoint", "only_hf_checkpoint", "optimizer", "precision"),
        *("profiler", "progress_bar", "python_log_level", "run_name", "save_filename"),
        *("save_folder", "save_ignore_keys", "save_interval", "save_latest_filename"),
        *("save_num_checkpoints_to_keep", "save_overwrite", "save_weights_only", "scheduler"),
        *("seed", "spin_dataloaders", "tokenizer", "tp_config", "train_loader"),
        *("train_subset_num_batches", "variables"),
    }
)
"The fields of `TrainConfig` of LLM-Foundry 0.22 (llmfoundry/utils/config_utils.py)."


@CHECKS.mix("warning", "LLM-Foundry 0.22 refuses the YAML when the run starts (ValueError).")
def top_level_key(mix: Mix) -> Findings:
    """Find keys at the top level of a whole training YAML (one with a model) that LLM-Foundry does
    not know, such as the variables of YAMLs that were written before it had `variables`.
    """
    keys = mix.yaml.config
    if "model" not in keys:
        return
    for key in sorted({*map(str, keys)} - TOP_LEVEL_KEYS):
        similar = find_nearest(key, TOP_LEVEL_KEYS)
        meant = f"write {similar} if that key was meant, or " if similar else ""
        yield Finding(
            f"the YAML has the key {key} at its top level, which LLM-Foundry does not know.",
            f"{meant}move {key} to variables (`${{variables.{key}}}` is its value then), or remove "
            "it.",
        )
