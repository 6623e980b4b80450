"""What all scripts here train: a small convolutional network on augmented images of 3 x 32 x 32, read one by one."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

EPOCHS, BATCH, WORKERS = 4, 32, 2  # the batch of a rank; loader workers of all ranks


class Images(Dataset):
    def __init__(self, samples: int, is_augmented: bool, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 10, (samples,), generator=random)
        classes = torch.randint(0, 256, (10, 3, 32, 32), generator=torch.Generator().manual_seed(0))
        noise = torch.randint(-100, 100, (samples, 3, 32, 32), generator=random)
        self.images = (classes[self.labels] + noise).clamp(0, 255).to(torch.uint8)
        self.is_augmented = is_augmented

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        image = self.images[index].float() / 255
        if self.is_augmented:
            image = image.flip(-1) if torch.rand(()) < 0.5 else image
            top, left = torch.randint(0, 9, (2,)).tolist()
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        return image, int(self.labels[index])


def data() -> tuple[Images, Images]:
    """(training, evaluation)."""
    return Images(4096, True, 1), Images(1024, False, 2)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip
    return model, torch.optim.AdamW(model.parameters(), 1e-3)
