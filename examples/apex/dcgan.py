"""A DCGAN: two models, two optimizers, and three losses, each with a loss scaler of its own.

    python examples/apex/dcgan.py --opt-level O1                # scikit-learn's digits, a minute or two on a CPU
    python examples/apex/dcgan.py --opt-level O2 --device cuda

The discriminator has a backward pass on real and one on generated images, and the generator has one. Their gradients
differ in size, so each loss has its own scaler, chosen by ``loss_id``; an overflow in one of the first two skips the
discriminator's step, an overflow in the third the generator's. The discriminator returns logits: binary cross entropy
of probabilities is refused under O1, because FP16 has none near 0 and 1. Samples are written as a PNG after each epoch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # examples/common.py, before torch
import torch
import torch.nn.functional as F
from data import Images, digits
from torch import Tensor, nn
from tqdm import tqdm

from fp16opt import amp

LATENT = 32
REAL, FAKE, GENERATOR = 0, 1, 2  # loss ids


class Generator(nn.Module):
    """From noise to 1 x 8 x 8 images with values from -1 to 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(LATENT, 2 * width, 2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.main(noise[:, :, None, None])


class Discriminator(nn.Module):
    """From images to one logit each: how real they look."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 2),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.main(images).flatten()


def initial_weights(module: nn.Module) -> None:
    """Those of the DCGAN paper (Radford et al., 2016)."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


class Game:
    """Both models and their optimizers, at one opt level."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        torch.manual_seed(arguments.seed)
        models = [Generator().apply(initial_weights), Discriminator().apply(initial_weights)]
        for model in models:
            model.to(self.device)
        adams = [torch.optim.Adam(model.parameters(), lr=arguments.lr, betas=(0.5, 0.999)) for model in models]
        (self.generator, self.discriminator), (self.optimizer_g, self.optimizer_d) = amp.initialize(
            models, adams, opt_level=arguments.opt_level, loss_scale=arguments.loss_scale, num_losses=3
        )
        self.fixed_noise = torch.randn(64, LATENT, device=self.device)

    def step(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """One step of each. Returns the losses of discriminator and generator."""
        fake = self.generator(torch.randn(len(real), LATENT, device=self.device))
        ones, zeros = torch.ones(len(real), device=self.device), torch.zeros(len(real), device=self.device)

        self.optimizer_d.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        with amp.scale_loss(loss_real, self.optimizer_d, loss_id=REAL) as scaled_loss:
            scaled_loss.backward()
        loss_fake = F.binary_cross_entropy_with_logits(self.discriminator(fake.detach()), zeros)
        with amp.scale_loss(loss_fake, self.optimizer_d, loss_id=FAKE) as scaled_loss:
            scaled_loss.backward()
        self.optimizer_d.step()

        self.optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
        with amp.scale_loss(loss_g, self.optimizer_g, loss_id=GENERATOR) as scaled_loss:
            scaled_loss.backward()
        self.optimizer_g.step()
        return (loss_real + loss_fake).detach(), loss_g.detach()

    def samples(self) -> Tensor:
        """64 images with values from 0 to 1, always of the same noise."""
        self.generator.eval()
        with torch.no_grad():
            images = self.generator(self.fixed_noise)
        self.generator.train()
        return (images.float().cpu()[:, 0] + 1) / 2


def save_png(images: Tensor, path: Path, columns: int = 8, zoom: int = 6) -> None:
    """The images side by side, enlarged."""
    from PIL import Image

    count, height, width = images.shape
    rows = images.view(count // columns, columns, height, width).permute(0, 2, 1, 3)
    grid = (rows.reshape(-1, columns * width).clamp(0, 1) * 255).round().byte().numpy()
    picture = Image.fromarray(grid)
    picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST).save(path)


def train(arguments: argparse.Namespace, images: Images) -> None:
    game = Game(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    pixels = images.images.float().to(game.device) / 127.5 - 1
    try:
        for epoch in range(arguments.epochs):
            order = torch.randperm(len(pixels))
            batches = [part for part in order.split(arguments.batch_size) if len(part) == arguments.batch_size]
            sums = torch.zeros(2, device=game.device)
            for part in tqdm(batches, leave=False, disable=arguments.quiet or not os.isatty(2)):
                sums += torch.stack(game.step(pixels[part]))
            mean_d, mean_g = (sums / len(batches)).tolist()
            scales = [entry["loss_scale"] for entry in amp.state_dict().values()]
            skipped = (game.optimizer_d.skipped_steps, game.optimizer_g.skipped_steps)
            print(f"epoch {epoch + 1:3}  D {mean_d:.3f}  G {mean_g:.3f}  scales {scales}  skipped {skipped}")
            save_png(game.samples(), arguments.output / "samples.png")
        spread = game.samples().std(dim=0).mean().item()
        print(f"samples differ by {spread:.3f} on average; real digits by {(pixels[:64].std(dim=0) / 2).mean():.3f}")
    finally:
        amp._amp_state.handle._deactivate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opt-level", default="O1", choices=("O0", "O1", "O2", "O3"))
    parser.add_argument("--loss-scale", help="a number or 'dynamic'; default: the level's")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("apex-dcgan-output"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--short", action="store_true", help="two epochs on part of the digits, for CI")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    common.choose_device(arguments.device)
    images, _ = digits()
    if arguments.short:
        arguments.epochs = min(arguments.epochs, 2)
        images = Images(images.images[:512], images.labels[:512], images.classes)
    train(arguments, images)


if __name__ == "__main__":
    main()
