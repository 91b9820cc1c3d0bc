//! What a broker does to take deliveries back, where it would otherwise take a setting of its node
//! or a minute.

use super::{Line, Output, Proxy, Unanswered};
use std::io;
use tokio::io::AsyncWriteExt;

#[derive(Clone, Copy, Debug)]
pub(super) enum Revoke {
    Cancel,
    Close(u16, &'static str),
}

impl Proxy {
    /// Cancels each consumer on the open connections, on both sides, as RabbitMQ 4.3 does at a consumer
    /// timeout; only that the broker requeues what is unacked when the channel is closed.
    pub(crate) fn cancel_consumers(&self) {
        self.line.revoke.send_replace(Some(Revoke::Cancel));
    }

    /// Closes each channel that consumes, on both sides, with this code and text.
    pub(crate) fn close_channels(&self, code: u16, text: &'static str) {
        self.line.revoke.send_replace(Some(Revoke::Close(code, text)));
    }
}

impl Line {
    /// Carries out what is ordered while the connection is open.
    pub(super) async fn revoking(
        &self,
        (client, broker): (&Output, &Output),
        unanswered: &Unanswered,
    ) -> io::Result<()> {
        let mut orders = self.revoke.subscribe();
        while orders.changed().await.is_ok() {
            let Some(order) = *orders.borrow_and_update() else { continue };
            for (channel, consumers) in unanswered.revoke(order) {
                match order {
                    Revoke::Cancel => {
                        for tag in consumers {
                            // The last bit is `nowait`.
                            let arguments = [short(&tag), vec![1]].concat();
                            let cancel = frame(channel, (60, 30), &arguments);
                            write(broker, &cancel).await?;
                            write(client, &cancel).await?;
                        }
                    }
                    Revoke::Close(code, text) => {
                        let (code, cause) = (code.to_be_bytes(), [0; 4]);
                        let arguments = [&code[..], &short(text.as_bytes()), &cause].concat();
                        write(broker, &frame(channel, (20, 40), &arguments)).await?;
                        write(client, &frame(channel, (20, 40), &arguments)).await?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Unanswered {
    /// The channels that consume, and the tags of their consumers.
    fn revoke(&self, order: Revoke) -> Vec<([u8; 2], Vec<Vec<u8>>)> {
        let mut channels = self.0.lock().expect("no panic inside");
        let consuming = channels.iter_mut().filter(|(_, channel)| !channel.consumers.is_empty());
        let told = consuming.map(|(number, channel)| {
            if let Revoke::Close(..) = order {
                (channel.severed, channel.close_ok_due) = (true, true);
                return (*number, std::mem::take(&mut channel.consumers));
            }
            (*number, channel.consumers.clone())
        });
        told.collect()
    }
}

fn short(text: &[u8]) -> Vec<u8> {
    [&[u8::try_from(text.len()).expect("a short string")], text].concat()
}

fn frame(channel: [u8; 2], (class, method): (u16, u16), arguments: &[u8]) -> Vec<u8> {
    let payload = [&class.to_be_bytes(), &method.to_be_bytes(), arguments].concat();
    let length = u32::try_from(payload.len()).expect("a frame").to_be_bytes();
    [&[1], &channel[..], &length, &payload, &[0xCE]].concat()
}

async fn write(output: &Output, frame: &[u8]) -> io::Result<()> {
    output.lock().await.write_all(frame).await
}
