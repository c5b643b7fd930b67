"""transformers' Trainer: a model of random weights is trained, saved, resumed from its checkpoint, and loaded as a whole."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Numbers in a row, which a model can learn."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(12) * (index % 5 + 1)) % 64
        return {"input_ids": words, "labels": words}


def model() -> LlamaForCausalLM:
    set_seed(5)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    return LlamaForCausalLM(
        LlamaConfig(
            **sizes, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2
        )
    )


def trained(steps: int, resume: bool) -> LlamaForCausalLM:
    arguments = TrainingArguments(
        "out",
        max_steps=steps,
        save_steps=3,
        per_device_train_batch_size=4,
        report_to=[],
        seed=5,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model(), arguments, train_dataset=Sentences())
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


def main() -> None:
    trained(3, resume=False)
    resumed = trained(6, resume=True)
    resumed.save_pretrained("whole")
    again = LlamaForCausalLM.from_pretrained("whole")
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    torch.save(resumed.state_dict(), "weights.bin")
    again.load_state_dict(torch.load("weights.bin", map_location="cpu", mmap=True))


if __name__ == "__main__":
    main()
