"""The reason codes of images that cannot be trained on, with their explanations."""

from __future__ import annotations

IMAGE_REASONS = {
    "image_not_found": (
        "There is no such file, object or bucket, or a server answers that there is none."
    ),
    "image_unreadable": "A disk or store refuses to read the image.",
    "image_empty": "The image's file has no bytes.",
    "not_an_image": (
        "The bytes have none of the supported formats; the detail gives their probable type."
    ),
    "image_truncated": "The end of the image is missing.",
    "image_damaged": "The image does not decode, or its EXIF cannot be read.",
    "image_animated": "The image has more than one frame.",
    "image_too_large": "The image has more pixels than max_pixels.",
    "image_depth": "The image has more than 8 bits a channel, and Pillow would turn it white.",
    "image_file_too_large": "The file has more than 256 MiB, or a server sends more than 64 MiB.",
    "bad_image_path": (
        "The path is not valid: it has a NUL or an unknown scheme, or leads out of the bucket, or "
        "under outside: refuse out of the folder."
    ),
    "remote_image": "The image is at an http(s) URL, and the recipe does not set http: fetch.",
    "image_not_fetched": "A server did not send the complete image in three tries or 60 s.",
    "image_refused": (
        "The recipe's processor does not accept an image of this size, alone or in a batch with "
        "another image."
    ),
    "too_many_images": "The record has more images than max_images.",
    "images_too_large": "The images of the record have more than 1 GiB together.",
}
