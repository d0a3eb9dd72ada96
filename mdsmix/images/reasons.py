"""The reason codes of images that cannot be trained on, with their explanations."""

from __future__ import annotations

IMAGE_REASONS = {
    "image_not_found": (
        "There is no such file, object or bucket, or a server answers that there is none."
    ),
    "image_unreadable": "A disk or store refuses to read the image.",
    "image_empty": "The image's file has no bytes.",
    "not_an_image": ("The bytes are of none of the formats; the detail says what they seem to be."),
    "image_truncated": "The end of the image is missing.",
    "image_damaged": "The image does not decode, or its EXIF cannot be read.",
    "image_animated": "The image has more than one frame.",
    "image_too_large": "The image has more pixels than max_pixels.",
    "image_depth": ("The image has more than 8 bits a channel, and Pillow would turn it white."),
    "image_file_too_large": ("The file has more than 256 MiB, or a server sends more than 64 MiB."),
    "bad_image_path": (
        "The path names no place: a NUL, an unknown scheme, a way out of the bucket, or "
        "of the folder under outside: refuse."
    ),
    "remote_image": ("The image is at an http(s) URL, and the recipe does not say http: fetch."),
    "image_not_fetched": "A server sent no whole image in three tries or 60 s.",
    "image_refused": (
        "The recipe's processor takes no image of this size, alone or in a batch with "
        "another image."
    ),
    "too_many_images": "The record has more images than max_images.",
    "images_too_large": "The images of the record come to more than 1 GiB.",
}
